"""A run that goes on from a loaded state is the continued run, exactly."""

import io

import pytest
import torch
from loop_lab import live
from resuming_lab import OUTER, REPLICAS, STEPS, Experiment, equal

from diloco_core import MismatchError, in_process
from diloco_core.testing import run_replicas


def whole(lab, experiment):
    return lab.run(experiment.whole, in_process(REPLICAS))


def stopped(lab, experiment, stop, **options):
    return lab.run(experiment.until(stop), in_process(REPLICAS, **options))


def goes_on(lab, experiment, saved, stop, wanted=None, **options):
    """Whether the rest of the run comes to what the whole run comes to."""
    again = lab.run(experiment.since(saved, stop), in_process(REPLICAS, **options))
    return all(map(equal, again, wanted or whole(lab, experiment)))


@pytest.mark.parametrize("outer", sorted(OUTER))
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_is_the_continued_run(lab, outer, stop):
    """Stopped before the first outer step, between two periods and within one; gone on with chunks
    of another size.
    """
    experiment = Experiment(lab, **OUTER[outer])
    saved = stopped(lab, experiment, stop, chunk_bytes=256)
    assert goes_on(lab, experiment, saved, stop, chunk_bytes=1000)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},  # its own state could not restore its fp32 global copy
        {"dtype": torch.float64},
        # Values of several dtypes lie in one fragment, each with elements 0, 1, … of its own.
        {"dtype": "mixed", "fragments": 1, **OUTER["Adam"]},
    ],
    ids=lambda options: str(options["dtype"]),
)
def test_every_dtype_is_saved_in_full(lab, options):
    experiment = Experiment(lab, **options)
    assert goes_on(lab, experiment, stopped(lab, experiment, 6), 6)


def test_it_may_be_stopped_after_any_step(lab):
    """Also before the first one, and before the flush at the end."""
    experiment = Experiment(lab)
    wanted = whole(lab, experiment)
    for stop in range(STEPS + 1):
        assert goes_on(lab, experiment, stopped(lab, experiment, stop), stop, wanted), stop


@pytest.mark.parametrize("outer", sorted(OUTER))
def test_twice_and_at_once(lab, outer):
    """A state that was loaded can be saved again, also before a step has been taken with it."""
    experiment = Experiment(lab, **OUTER[outer])
    first = stopped(lab, experiment, 5)
    second = lab.run(experiment.until(5, resumed_from=first, start=5), in_process(REPLICAS))
    third = experiment.until(6, resumed_from=second, start=5)
    third = lab.run(third, in_process(REPLICAS, chunk_bytes=400))
    assert goes_on(lab, experiment, third, 6)


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
    wanted = whole(lab, experiment)
    assert goes_on(lab, experiment, stopped(lab, experiment, stop), stop, wanted)
    assert [run["counters"].tolist()[1] for run in wanted] == [STEPS, STEPS - 1, STEPS]


def test_states_are_to_be_saved_at_the_same_sync(lab):
    """By number of batches, some replicas would save before a sync and some after it; by on_sync,
    all save after it.
    """
    saved = stopped(lab, Skipping(lab), 8)
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
        live(model, inner, outer, *range(done[exchange.rank], STEPS))
        return experiment.held(model, inner, outer)

    assert all(map(equal, lab.run(rest, in_process(REPLICAS)), wanted))
