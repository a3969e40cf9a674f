"""A run that goes on from a loaded state, or from a saved one, is the continued run."""

import pytest
import torch
from loop_lab import exchanges, loop
from resuming_lab import OUTER, REPLICAS, STEPS, Experiment, equal
from torch.optim import lr_scheduler

from diloco_core import in_process


def whole(lab, experiment):
    return lab.run(experiment.whole, in_process(REPLICAS))


def stopped(lab, experiment, stop, **options):
    return lab.run(experiment.until(stop), in_process(REPLICAS, **options))


def goes_on(lab, experiment, saved, stop, wanted=None, **options):
    """Return whether the rest of the run comes to what the whole run comes to."""
    again = lab.run(experiment.since(saved, stop), in_process(REPLICAS, **options))
    return all(map(equal, again, wanted or whole(lab, experiment)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "stop"),
    [
        *((options, 7) for options in OUTER.values()),
        (OUTER["Adam"], 1),
        ({"dtype": torch.bfloat16}, 6),  # its own state could not restore its fp32 global copy
        ({"dtype": torch.float64}, 6),
        # Values of several dtypes lie in one fragment, each with elements 0, 1, … of its own.
        ({"dtype": "mixed", "fragments": 1, **OUTER["Adam"]}, 6),
    ],
)
def test_a_resumed_run_is_the_continued_run(lab, options, stop):
    """Stopped before the first outer step, or in a period; gone on with other chunks."""
    experiment = Experiment(lab, **options)
    saved = stopped(lab, experiment, stop, chunk_bytes=256)
    assert goes_on(lab, experiment, saved, stop, chunk_bytes=1000)


def test_it_may_be_stopped_after_any_step(lab):
    """Also before the first one, and before the flush at the end."""
    experiment = Experiment(lab)
    wanted = whole(lab, experiment)
    for stop in range(STEPS + 1):
        assert goes_on(lab, experiment, stopped(lab, experiment, stop), stop, wanted), stop


@pytest.mark.parametrize("outer", ["Nesterov", "NAdam"])
def test_twice_and_at_once(lab, outer):
    """A state that was loaded can be saved again, also before a step has been taken with it."""
    experiment = Experiment(lab, **OUTER[outer])
    first = stopped(lab, experiment, 5)
    second = lab.run(experiment.until(5, resumed_from=first, start=5), in_process(REPLICAS))
    third = experiment.until(6, resumed_from=second, start=5)
    third = lab.run(third, in_process(REPLICAS, chunk_bytes=400))
    assert goes_on(lab, experiment, third, 6)


class TestAnotherPeriod:
    @pytest.mark.sampled
    @pytest.mark.parametrize(("before", "after"), [(8, 2), (4, 8), (2, 6)])
    @pytest.mark.parametrize("stop", [1, 5, 6])
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


class Skipping(Experiment):
    """Rank 1 skips a step, so that its counters differ from the others' from then on."""

    def steps(self, model, inner, rank, steps):
        super().steps(model, inner, rank, [step for step in steps if (rank, step) != (1, 2)])


@pytest.mark.sampled
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_replicas_that_have_skipped_steps_can_be_resumed(lab, stop):
    experiment = Skipping(lab)
    wanted = whole(lab, experiment)
    assert goes_on(lab, experiment, stopped(lab, experiment, stop), stop, wanted)
    assert [run["counters"].tolist()[1] for run in wanted] == [STEPS, STEPS - 1, STEPS]


SCHEDULES = {
    "cosine": lambda inner: lr_scheduler.CosineAnnealingLR(inner, T_max=40),
    "lambda": lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 0.97**step),
    "in sequence": lambda inner: lr_scheduler.SequentialLR(
        inner,
        [lr_scheduler.LinearLR(inner, 0.1, total_iters=4), lr_scheduler.StepLR(inner, 3)],
        milestones=[5],
    ),
}


def incarnation(lab, exchange, make, steps, *, killed=False, every=10, after=False):
    """Train up to a number of inner steps. The learning rate of every step, and the model."""
    net = lab.fill(torch.nn.Linear(3, 2))
    inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    schedule = make(inner)
    options = {"stateful": {"schedule": schedule}, "save_inner_every": every}
    outer, rates = loop(exchange, net, inner, **options)[2], []
    try:
        with outer:
            while outer.inner_steps < steps:
                while not after and schedule.last_epoch < outer.inner_steps:
                    schedule.step()
                rates.append((outer.inner_steps, inner.param_groups[0]["lr"]))
                lab.push(net, inner, 0, outer.inner_steps)
                if after:
                    schedule.step()
            if killed:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return rates


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("kind", "killed"), [("store", False), ("elastic", True)])
@pytest.mark.filterwarnings(
    "ignore:Detected call of:UserWarning"
)  # torch does not know of earlier incarnations
def test_it_is_stepped_up_to_the_inner_step(lab, tmp_path, kind, name, killed):
    """Incarnations begin with a schedule that is behind the run by as much as a sync."""
    make = SCHEDULES[name]
    wanted = incarnation(lab, *exchanges(kind, 1), make, 14)
    rates = []
    for number, steps in enumerate((6, 10, 14)):
        (exchange,) = exchanges(kind, 1, tmp_path, resume=bool(number) and kind == "store")
        rates += incarnation(lab, exchange, make, steps, killed=killed and steps < 14, every=2)
    assert rates == wanted
    assert len({rate for _, rate in rates}) > 3


def test_a_step_after_the_last_sync_is_saved_when_the_block_is_left(lab, tmp_path):
    make, options = SCHEDULES["cosine"], {"every": 1, "after": True}
    wanted = incarnation(lab, *exchanges("store", 1), make, 12, **options)
    first = incarnation(lab, *exchanges("store", 1, tmp_path), make, 6, **options)
    rest = incarnation(lab, *exchanges("store", 1, tmp_path, resume=True), make, 12, **options)
    assert first + rest == wanted
