"""A resumed run is the continued run, exactly; a state that does not fit is refused."""

import io

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, ObjectStoreExchange, SyncError, in_process
from diloco_core._store import open_store
from diloco_core.testing import run_replicas

REPLICAS, STEPS = 3, 11


def make_model(lab, dtype):
    return lab.fill(nn.Sequential(nn.Linear(17, 19), nn.BatchNorm1d(19), nn.Linear(19, 3)).to(dtype))


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

    def states(self, lab, world_size, **options):
        """Real states, one per rank."""

        def replica(exchange):
            model, inner, outer = self.outer(exchange, **options)
            with outer:
                lab.push(model, inner, exchange.rank, 0)
                lab.push(model, inner, exchange.rank, 1)
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
        with pytest.raises(ConfigurationError, match="its version is 99, here it is 1"):
            outer.load_state_dict({**state, "version": 99})

    @pytest.mark.parametrize(
        "model",
        [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 2)).double()],
        ids=["another shape", "another dtype"],
    )
    def test_another_model(self, lab, model):
        (state,) = self.states(lab, 1)
        _, _, outer = self.outer(in_process(1)[0], model)
        with pytest.raises(ConfigurationError, match="its fragments is"):
            outer.load_state_dict(state)

    def test_other_fragments(self, lab):
        (state,) = self.states(lab, 1, fragments=2)
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match="its fragments is"):
            outer.load_state_dict(state)

    def test_something_else_altogether(self):
        _, _, outer = self.outer(in_process(1)[0])
        with pytest.raises(ConfigurationError, match="its version is None"):
            outer.load_state_dict({"weight": torch.ones(1)})

    def test_the_outer_state_of_other_shards(self, lab):
        """A state put together from two ranks: the global copy is everybody's, but the momentum is not."""
        first, second = self.states(lab, 2)
        mixed = {**first, "fragments": [{**first["fragments"][0], "outer": second["fragments"][0]["outer"]}]}

        def replica(exchange):
            model, inner, outer = self.outer(exchange)
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
        """A replica whose saved file was damaged in a way that no size tells."""
        states = self.states(lab, 2)
        states[1]["fragments"][0]["copy"][0][7] += 1.0

        def replica(exchange):
            _, _, outer = self.outer(exchange)
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
