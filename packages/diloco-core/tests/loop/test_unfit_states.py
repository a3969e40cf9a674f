"""Saved states that do not fit where they are loaded."""

import pytest
import torch
from resuming_lab import Experiment, make_model
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, SyncError, in_process
from diloco_core._loop._saved import digest_of
from diloco_core.testing import run_replicas


class TestWhatDoesNotFit:
    def outer(self, exchange, model=None, **options):
        model = model or nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, inner, DiLoCo(model, inner, exchange, **{"sync_every": 2, **options})

    def states(self, lab, world_size, models=None, **options):
        """Real states, one per rank; what the models hold goes into ``models``."""

        def replica(exchange):
            model, inner, outer = self.outer(exchange, **options)
            with outer:
                lab.push(model, inner, exchange.rank, 0)
                lab.push(model, inner, exchange.rank, 1)
            if models is not None:
                models[exchange.rank] = lab.values(model)
            return outer.state_dict()

        return lab.run(replica, in_process(world_size))

    def test_another_rank(self, lab):
        states = self.states(lab, 2)
        _, _, outer = self.outer(in_process(2)[0])
        with pytest.raises(ConfigurationError, match="rank is 1 in the saved state, but 0 in"):
            outer.load_state_dict(states[1])

    def test_another_world_size(self, lab):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(2)[0])
        with pytest.raises(
            ConfigurationError, match="world_size is 1 in the saved state, but 2 in"
        ):
            outer.load_state_dict(state)

    def test_another_version(self, lab):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match="version is 99 in the saved state, but 4 in"):
            outer.load_state_dict({**state, "version": 99})

    @pytest.mark.parametrize(
        ("model", "named"),
        [
            (
                nn.Sequential(nn.Linear(2, 21), nn.Linear(21, 2)),
                r"tensor '0.weight' is float32\[20, 2\].*float32\[21, 2\]",
            ),
            (
                nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 2)).double(),
                r"tensor '0.weight' is float32.* in the saved state, but float64",
            ),
            (
                nn.ModuleDict({"a": nn.Linear(2, 20), "b": nn.Linear(20, 2)}),
                "tensor 'a.weight' is absent in the saved state, but float32",
            ),
            (
                nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 2), nn.Linear(2, 2)),
                "tensor '2.weight' is absent",
            ),
            (
                nn.Sequential(nn.Linear(2, 20)),
                "tensor '1.weight' is float32.* in the saved state, but absent",
            ),
        ],
        ids=["another shape", "another dtype", "other names", "one more", "one less"],
    )
    def test_another_model(self, lab, model, named):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(1)[0], model)
        with pytest.raises(ConfigurationError, match=named):
            outer.load_state_dict(state)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"fragments": 2}, "setting 'fragments' is 1 in the saved state, but 2 in"),
            ({"buffers": "rank0"}, "setting 'buffers' is mean in the saved state, but rank0 in"),
            ({"outer_lr": 0.5}, "setting 'outer_lr' is 0.7 in the saved state, but 0.5 in"),
            (
                {"outer_momentum": 0.8},
                "setting 'outer_momentum' is 0.9 in the saved state, but 0.8 in",
            ),
            (
                {"nesterov": False},
                "setting 'outer_nesterov' is True in the saved state, but False in",
            ),
            (
                {"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.7)},
                "'outer_optimizer' is SGD in the saved state, but Adam in",
            ),
        ],
        ids=["fragments", "buffers", "lr", "momentum", "nesterov", "optimizer"],
    )
    def test_other_settings_that_decide(self, lab, options, named):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(1)[0], **options)
        with pytest.raises(ConfigurationError, match=named):
            outer.load_state_dict(state)

    @pytest.mark.parametrize("wrong", [None, [1, 2], "state"])
    def test_what_is_no_state(self, wrong):
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match=r"must be what DiLoCo\.state_dict"):
            outer.load_state_dict(wrong)

    @pytest.mark.parametrize(
        "key",
        ["settings", "tensors", "model", "committed", "inner_steps", "since_sync", "fragments"],
    )
    def test_a_state_that_is_not_whole(self, lab, key):
        (state,) = self.states(lab, 1)
        del state[key]
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match=r"have changed since .* some are missing"):
            outer.load_state_dict(state)

    def test_something_else_altogether(self):
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match="version is None in the saved state"):
            outer.load_state_dict({"weight": torch.ones(1)})

    def test_the_outer_state_of_other_shards(self, lab):
        """The state is put together from two ranks: only the global copy is common to them."""
        first, second = self.states(lab, 2, models := {})
        mixed = {
            **first,
            "fragments": [{**first["fragments"][0], "outer": second["fragments"][0]["outer"]}],
        }
        mixed["digest"] = digest_of(mixed)

        def replica(exchange):
            model, inner, outer = self.outer(exchange)
            model.load_state_dict(models[exchange.rank])
            outer.load_state_dict(mixed if exchange.rank == 0 else second)
            with outer:
                lab.push(model, inner, exchange.rank, 2)

        results = run_replicas(replica, in_process(2))
        assert isinstance(results[0], ConfigurationError)
        assert "outer optimizer's state for the shards of another replica" in str(results[0])

    def test_states_of_different_syncs(self, lab):
        """One replica goes on from a later state than the other."""
        experiment = Experiment(lab)
        early = lab.run(experiment.until(3), in_process(2))
        late = lab.run(experiment.until(9), in_process(2))
        results = run_replicas(experiment.since([early[0], late[1]], 9), in_process(2))
        assert all(isinstance(result, MismatchError) for result in results), results
        assert "differ in setting 'committed'" in str(results[0])
        assert "that were saved after the same outer step" in str(results[0])

    def test_global_copies_that_differ(self, lab):
        """A replica whose saved file was made by hand."""
        states = self.states(lab, 2, models := {})
        states[1]["fragments"][0]["copy"][0][7] += 1.0
        states[1]["digest"] = digest_of(states[1])

        def replica(exchange):
            model, _, outer = self.outer(exchange)
            model.load_state_dict(models[exchange.rank])
            outer.load_state_dict(states[exchange.rank])
            with outer:
                pass

        results = run_replicas(replica, in_process(2))
        assert all(isinstance(result, MismatchError) for result in results), results
        assert "tensor '0.weight'" in str(results[0])

    def test_loading_comes_before_entering(self, lab):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(1)[0])
        with outer, pytest.raises(SyncError, match="before"):
            outer.load_state_dict(state)

    @pytest.mark.parametrize("what", ["nothing", "a parameter", "a buffer", "a later step"])
    def test_a_model_that_was_not_loaded(self, lab, what):
        """Else the first sync would take the difference for progress."""
        experiment = Experiment(lab)
        saved = lab.run(experiment.until(5), in_process(1))
        model, inner, outer = experiment.parts(in_process(1)[0])
        experiment.load(saved[0], model, inner, outer)
        if what == "nothing":
            model.load_state_dict(make_model(lab, torch.float32).state_dict())
        elif what == "a parameter":
            model[2].bias.data[1] += 1e-7
        elif what == "a buffer":
            model[1].running_var[3] += 1e-7
        else:
            lab.push(model, torch.optim.SGD(model.parameters(), lr=1.0), 0, 5)
        with pytest.raises(
            ConfigurationError,
            match=r"does not hold the values that it held when the state .* was saved.*"
            "load_state_dict",
        ):
            outer.__enter__()

    def test_the_others_are_told_of_it(self, lab):
        saved = lab.run(Experiment(lab).until(5), in_process(2))

        def replica(exchange):
            model, inner, outer = Experiment(lab).parts(exchange)
            experiment_load = Experiment(lab).load
            experiment_load(saved[exchange.rank], model, inner, outer)
            if exchange.rank == 1:
                model[2].bias.data[1] += 1.0
            with outer:
                pass

        first, second = run_replicas(replica, in_process(2))
        assert isinstance(second, ConfigurationError)
        assert "'2.bias'" in str(second)
        assert "rank 1 failed" in str(first)
