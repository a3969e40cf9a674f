"""A resumed run is the continued run, exactly; a state that does not fit is refused."""

import io

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, ObjectStoreExchange, SyncError, in_process
from diloco_core._diloco_state import digest_of
from diloco_core._store import open_store
from diloco_core.testing import run_replicas

REPLICAS, STEPS = 3, 11


def make_model(lab, dtype):
    model = nn.Sequential(nn.Linear(17, 19), nn.BatchNorm1d(19), nn.Linear(19, 3))
    if dtype == "mixed":
        model[2].double()
    return lab.fill(model if dtype == "mixed" else model.to(dtype))


OUTER = {
    "Nesterov": {},
    "plain SGD": {"outer_momentum": 0.0},
    "Adam": {"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)},
    "NAdam": {"outer_optimizer": lambda p: torch.optim.NAdam(p, lr=0.1)},
    "RMSprop": {"outer_optimizer": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5)},
}


class Experiment:
    """A run that can be stopped after any step and gone on with."""

    def __init__(self, lab, *, dtype=torch.float32, **options):
        self.lab = lab
        self.dtype = dtype
        self.options = {"sync_every": 4, "fragments": 2, **options}

    def parts(self, exchange):
        model = make_model(self.lab, self.dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, inner, DiLoCo(model, inner, exchange, **self.options)

    def steps(self, model, inner, rank, steps):
        for step in steps:
            self.lab.push(model, inner, rank, step)
            model[1].running_mean.add_(0.25 * (1 + rank))

    def whole(self, exchange):
        """All steps in one life: what the model and the outer loop hold at the end."""
        model, inner, outer = self.parts(exchange)
        with outer:
            self.steps(model, inner, exchange.rank, range(STEPS))
        return self.held(model, inner, outer)

    def until(self, stop, resumed_from=None, start=0):
        """The state after ``stop`` steps, as bytes."""

        def replica(exchange):
            model, inner, outer = self.parts(exchange)
            if resumed_from is not None:
                self.load(resumed_from[exchange.rank], model, inner, outer)
            with outer:
                self.steps(model, inner, exchange.rank, range(start, stop))
                saved = io.BytesIO()
                torch.save([model.state_dict(), inner.state_dict(), outer.state_dict()], saved)
            return saved.getvalue()

        return replica

    def since(self, saved, start):
        """The rest of the run, from saved bytes."""

        def replica(exchange):
            model, inner, outer = self.parts(exchange)
            self.load(saved[exchange.rank], model, inner, outer)
            with outer:
                self.steps(model, inner, exchange.rank, range(start, STEPS))
            return self.held(model, inner, outer)

        return replica

    def load(self, saved, *parts):
        # weights_only: a state holds tensors and plain values, nothing that runs code when it is read.
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def held(self, model, inner, outer):
        state = outer.state_dict()
        held = {f"model.{name}": value for name, value in self.lab.values(model).items()}
        for number, parameter in enumerate(model.parameters()):
            held[f"inner.{number}"] = inner.state[parameter]["exp_avg"].clone()
        for number, fragment in enumerate(state["fragments"]):
            for group, copy in enumerate(fragment["copy"]):
                held[f"copy.{number}.{group}"] = copy.clone()
            for name in {name for entry in fragment["outer"]["ranges"] for name in entry["tensors"]}:
                # Chunks of another size cut the same elements elsewhere.
                parts = [entry["tensors"][name] for entry in fragment["outer"]["ranges"]]
                held[f"outer.{number}.{name}"] = torch.cat(parts)
            for name, value in fragment["outer"]["scalars"].items():
                held[f"outer.{number}.{name}"] = torch.tensor(value)
        held["counters"] = torch.tensor([outer.committed, outer.inner_steps])
        return held


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("outer", sorted(OUTER))
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_is_the_continued_run(lab, outer, stop):
    """Stopped before the first outer step, between two periods and within one; gone on with chunks of another size."""
    experiment = Experiment(lab, **OUTER[outer])
    wanted = lab.run(experiment.whole, in_process(REPLICAS, chunk_bytes=256))
    saved = lab.run(experiment.until(stop), in_process(REPLICAS, chunk_bytes=256))
    again = lab.run(experiment.since(saved, stop), in_process(REPLICAS, chunk_bytes=1000))
    assert all(map(equal, again, wanted))


def test_every_dtype_has_its_outer_state(lab):
    """Values of several dtypes lie in one fragment, each with elements 0, 1, … of its own."""
    experiment = Experiment(lab, dtype="mixed", fragments=1, **OUTER["Adam"])
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(6), in_process(REPLICAS))
    assert all(map(equal, lab.run(experiment.since(saved, 6), in_process(REPLICAS)), wanted))


@pytest.mark.parametrize("stop", range(STEPS + 1))
def test_it_may_be_stopped_after_any_step(lab, stop):
    """Also before the first one, and before the flush at the end."""
    experiment = Experiment(lab)
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(stop), in_process(REPLICAS))
    assert all(map(equal, lab.run(experiment.since(saved, stop), in_process(REPLICAS)), wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_global_copy_is_saved_in_full(lab, dtype):
    """A bf16 model's own state could not restore its fp32 global copy."""
    experiment = Experiment(lab, dtype=dtype)
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(6), in_process(REPLICAS))
    assert all(map(equal, lab.run(experiment.since(saved, 6), in_process(REPLICAS)), wanted))


@pytest.mark.parametrize("outer", sorted(OUTER))
def test_twice_and_at_once(lab, outer):
    """A state that was loaded can be saved again, also before a step has been taken with it."""
    experiment = Experiment(lab, **OUTER[outer])
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    first = lab.run(experiment.until(5), in_process(REPLICAS))
    second = lab.run(experiment.until(5, resumed_from=first, start=5), in_process(REPLICAS))
    third = lab.run(experiment.until(6, resumed_from=second, start=5), in_process(REPLICAS, chunk_bytes=400))
    assert all(map(equal, lab.run(experiment.since(third, 6), in_process(REPLICAS)), wanted))


def test_over_a_store_it_goes_on_at_a_new_prefix(lab, tmp_path):
    def folder(name):
        return [ObjectStoreExchange(open_store(str(tmp_path / name)), rank, REPLICAS) for rank in range(REPLICAS)]

    experiment = Experiment(lab)
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(6), folder("first"))
    assert all(map(equal, lab.run(experiment.since(saved, 6), folder("second")), wanted))


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
        with pytest.raises(ConfigurationError, match="its rank is 1, here it is 0"):
            outer.load_state_dict(states[1])

    def test_another_world_size(self, lab):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(2)[0])
        with pytest.raises(ConfigurationError, match="its world_size is 1, here it is 2"):
            outer.load_state_dict(state)

    def test_another_version(self, lab):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match="its version is 99, here it is 3"):
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
                r"tensor '0.weight' is float32.*it is float64",
            ),
            (
                nn.ModuleDict({"a": nn.Linear(2, 20), "b": nn.Linear(20, 2)}),
                "tensor 'a.weight' is absent, here it is float32",
            ),
            (nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 2), nn.Linear(2, 2)), "tensor '2.weight' is absent"),
            (nn.Sequential(nn.Linear(2, 20)), "tensor '1.weight' is float32.*here it is absent"),
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
            ({"fragments": 2}, "setting 'fragments' is 1, here it is 2"),
            ({"buffers": "rank0"}, "setting 'buffers' is mean, here it is rank0"),
            ({"outer_lr": 0.5}, "setting 'outer_lr' is 0.7, here it is 0.5"),
            ({"outer_momentum": 0.8}, "setting 'outer_momentum' is 0.9, here it is 0.8"),
            ({"nesterov": False}, "setting 'outer_nesterov' is True, here it is False"),
            ({"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.7)}, "'outer_optimizer' is SGD, here it is Adam"),
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
        with pytest.raises(ConfigurationError, match="must be what state_dict"):
            outer.load_state_dict(wrong)

    @pytest.mark.parametrize(
        "key", ["settings", "tensors", "model", "committed", "inner_steps", "since_sync", "fragments"]
    )
    def test_a_state_that_is_not_whole(self, lab, key):
        (state,) = self.states(lab, 1)
        del state[key]
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match=f"it has no {key!r}"):
            outer.load_state_dict(state)

    def test_something_else_altogether(self):
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match="its version is None"):
            outer.load_state_dict({"weight": torch.ones(1)})

    def test_the_outer_state_of_other_shards(self, lab):
        """A state put together from two ranks: the global copy is everybody's, but the momentum is not."""
        first, second = self.states(lab, 2, models := {})
        mixed = {**first, "fragments": [{**first["fragments"][0], "outer": second["fragments"][0]["outer"]}]}
        mixed["digest"] = digest_of(mixed)

        def replica(exchange):
            model, inner, outer = self.outer(exchange)
            model.load_state_dict(models[exchange.rank])
            outer.load_state_dict(mixed if exchange.rank == 0 else second)
            with outer:
                lab.push(model, inner, exchange.rank, 2)

        results = run_replicas(replica, in_process(2))
        assert isinstance(results[0], ConfigurationError)
        assert "outer optimizer's state for other shards" in str(results[0])

    def test_states_of_different_syncs(self, lab):
        """One replica goes on from a later state than the other."""
        experiment = Experiment(lab)
        early = lab.run(experiment.until(3), in_process(2))
        late = lab.run(experiment.until(9), in_process(2))
        results = run_replicas(experiment.since([early[0], late[1]], 9), in_process(2))
        assert all(isinstance(result, MismatchError) for result in results), results
        assert "differ in setting 'committed'" in str(results[0])

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
            ConfigurationError, match=r"does not hold what it held when the state .* was saved.*load_state_dict"
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


class TestAnotherPeriod:
    @pytest.mark.parametrize(("before", "after"), [(8, 2), (8, 4), (4, 8), (2, 6)])
    @pytest.mark.parametrize("stop", [1, 3, 5, 6, 7])
    def test_sync_every_may_change(self, lab, before, after, stop):
        """A period that is over is synced after the next step, and then all go on with the new one."""
        first = Experiment(lab, sync_every=before)
        saved = lab.run(first.until(stop), in_process(2))
        reports = {0: [], 1: []}

        def replica(exchange):
            experiment = Experiment(lab, sync_every=after, on_sync=reports[exchange.rank].append)
            model, inner, outer = experiment.parts(exchange)
            experiment.load(saved[exchange.rank], model, inner, outer)
            start = outer.committed
            with outer:
                experiment.steps(model, inner, exchange.rank, range(stop, stop + 20))
                synced = outer.committed - start
            return {name: p.detach() for name, p in model.named_parameters()}, synced

        runs = lab.run(replica, in_process(2))
        assert lab.identical([held for held, _ in runs])
        open_steps = stop % (before // 2)
        period = after // 2
        regular = [report.total_inner_steps for report in reports[0]][: runs[0][1]]
        wanted = range(stop + max(1, period - open_steps), stop + 21, period)
        assert regular == list(wanted)
        assert [r.total_inner_steps for r in reports[1]] == [r.total_inner_steps for r in reports[0]]

    def test_it_changes_for_all_replicas_alike(self, lab):
        saved = lab.run(Experiment(lab).until(5), in_process(2))

        def replica(exchange):
            experiment = Experiment(lab, sync_every=4 + 2 * exchange.rank)
            model, inner, outer = experiment.parts(exchange)
            experiment.load(saved[exchange.rank], model, inner, outer)
            with outer:
                pass

        for result in run_replicas(replica, in_process(2)):
            assert isinstance(result, MismatchError)
            assert "setting 'sync_every'" in str(result)


class Skipping(Experiment):
    """Rank 1 skips a step, as by its gradient scaler: its counters differ from the others' for the rest of the run."""

    def steps(self, model, inner, rank, steps):
        super().steps(model, inner, rank, [step for step in steps if (rank, step) != (1, 2)])


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_replicas_that_have_skipped_steps_can_be_resumed(lab, stop):
    experiment = Skipping(lab)
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(stop), in_process(REPLICAS))
    assert all(map(equal, lab.run(experiment.since(saved, stop), in_process(REPLICAS)), wanted))
    assert [run["counters"].tolist()[1] for run in wanted] == [STEPS, STEPS - 1, STEPS]


def test_states_are_to_be_saved_at_the_same_sync(lab):
    """By number of batches, some replicas would save before a sync and some after it; by on_sync, all save after it."""
    saved = lab.run(Skipping(lab).until(8), in_process(REPLICAS))
    for result in run_replicas(Skipping(lab).since(saved, 8), in_process(REPLICAS)):
        assert isinstance(result, MismatchError)
        assert "setting 'committed'" in str(result)
    saved.clear()
    done = {}

    def replica(exchange):
        def save(report):
            if report.sync == 4:
                done[exchange.rank] = report.total_inner_steps + (exchange.rank == 1)
                content = io.BytesIO()
                torch.save([model.state_dict(), inner.state_dict(), outer.state_dict()], content)
                saved.append((exchange.rank, content.getvalue()))

        experiment = Skipping(lab, on_sync=save)
        model, inner, outer = experiment.parts(exchange)
        with outer:
            # The statistics are left alone: what changes them after the sync of a step would be in no state.
            for step in range(STEPS):
                if (exchange.rank, step) != (1, 2):
                    lab.push(model, inner, exchange.rank, step)
        return experiment.held(model, inner, outer)

    wanted = lab.run(replica, in_process(REPLICAS))
    states = [content for _, content in sorted(saved)]
    assert done == {0: 8, 1: 9, 2: 8}

    def rest(exchange):
        experiment = Skipping(lab)
        model, inner, outer = experiment.parts(exchange)
        experiment.load(states[exchange.rank], model, inner, outer)
        with outer:
            for step in range(done[exchange.rank], STEPS):
                lab.push(model, inner, exchange.rank, step)
        return experiment.held(model, inner, outer)

    assert all(map(equal, lab.run(rest, in_process(REPLICAS)), wanted))


DAMAGES = {
    "no fragments": {"fragments": []},
    "fragments of another kind": {"fragments": None},
    "fragments without values": {"fragments": [{}]},
    "an outer optimizer without its state": {"outer": {}},
    "an outer optimizer of another kind": {"outer": None},
    "values of another kind": {"copy": [1.0]},
    "settings": {"settings": None},
    "tensors": {"tensors": 3},
    "the model": {"model": None},
    "a counter that is text": {"committed": "3"},
    "a counter below 0": {"since_event": -5},
    "a counter that is missing": {"inner_steps": None},
    "a truth value": {"committed": True},
    "another number of counters": {"since_sync": [1, 2]},
    "counters of another kind": {"since_sync": None},
    "optimizers that have stepped": {"stepped": 1},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_is_not_as_it_was_saved_is_refused(lab, damage):
    def parts():
        model = lab.fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, inner, DiLoCo(model, inner, in_process(1)[0], sync_every=2)

    _, _, outer = parts()
    with outer:
        state = outer.state_dict()
    changes = DAMAGES[damage]
    if changes.keys() & {"outer", "copy"}:
        changes = {"fragments": [{**state["fragments"][0], **changes}]}
    model, inner, outer = parts()
    with pytest.raises(ConfigurationError, match="the saved outer loop"):
        outer.load_state_dict({**state, **changes})
    outer.load_state_dict(state)
    with outer:
        lab.push(model, inner, 0, 0)
    assert outer.committed == 1
