"""A resumed run is the continued run, exactly; a state that does not fit is refused."""

import io

import pytest
import torch
from resuming_lab import OUTER, REPLICAS, STEPS, Experiment, equal
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, StoreExchange, in_process
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


@pytest.mark.parametrize("outer", sorted(OUTER))
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_is_the_continued_run(lab, outer, stop):
    """Stopped before the first outer step, between two periods and within one; gone on with chunks
    of another size.
    """
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
    third = lab.run(
        experiment.until(6, resumed_from=second, start=5), in_process(REPLICAS, chunk_bytes=400)
    )
    assert all(map(equal, lab.run(experiment.since(third, 6), in_process(REPLICAS)), wanted))


def test_over_a_store_it_goes_on_at_a_new_prefix(lab, tmp_path):
    def folder(name):
        return [
            StoreExchange(open_store(str(tmp_path / name)), rank, REPLICAS)
            for rank in range(REPLICAS)
        ]

    experiment = Experiment(lab)
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(6), folder("first"))
    assert all(map(equal, lab.run(experiment.since(saved, 6), folder("second")), wanted))


class TestAnotherPeriod:
    @pytest.mark.parametrize(("before", "after"), [(8, 2), (8, 4), (4, 8), (2, 6)])
    @pytest.mark.parametrize("stop", [1, 3, 5, 6, 7])
    def test_sync_every_may_change(self, lab, before, after, stop):
        """A period that is over is synced after the next step; then all go on with the new one."""
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
        assert [r.total_inner_steps for r in reports[1]] == [
            r.total_inner_steps for r in reports[0]
        ]

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
    """Rank 1 skips a step, as by its gradient scaler: its counters differ from the others' for the
    rest of the run.
    """

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
    """By number of batches, some replicas would save before a sync and some after it; by on_sync,
    all save after it.
    """
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
            # The statistics are left alone: what changes them after the sync of a step would be in
            # no state.
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
    with pytest.raises(ConfigurationError, match="the saved state of the outer loop"):
        outer.load_state_dict({**state, **changes})
    outer.load_state_dict(state)
    with outer:
        lab.push(model, inner, 0, 0)
    assert outer.committed == 1
