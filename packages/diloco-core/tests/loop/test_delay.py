"""Syncs that go on while the replicas train, by ``delay`` and ``alpha``."""

import threading
from dataclasses import replace

import pytest
import torch
from delay_lab import INNER, OUTER, by_the_formulas, train
from hypothesis import given
from hypothesis import strategies as st
from loop_lab import at_once, exchanges, live, loop
from torch import nn

from diloco_core import (
    ModelChangedError,
    NonFiniteDeltaError,
    ReplicaLostError,
    SyncError,
    Timing,
    connect,
    in_process,
)


def same(ours, theirs):
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        for step, other in zip(ours, theirs, strict=True)
        for a, b in zip(step, other, strict=True)
    )


@st.composite
def grid(draw):
    period = draw(st.integers(1, 5))
    return {
        "replicas": draw(st.integers(1, 3)),
        "fragments": draw(st.integers(1, 3)),
        "period": period,
        "delay": draw(st.integers(0, period - 1)),
        "alpha": draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        "inner": draw(st.sampled_from(sorted(INNER))),
        "outer": draw(st.sampled_from(sorted(OUTER))),
        "steps": draw(st.integers(1, 14)),
    }


@given(
    grid(),
    st.sampled_from(["threads", "store", "sharded", "gather", "manager"]),
    st.sets(st.integers(0, 4), max_size=2),
)
def test_every_step_is_that_of_the_formulas(lab, case, kind, refused):
    replicas = case.pop("replicas")
    refused = refused if kind == "manager" else ()
    wanted, committed = by_the_formulas(replicas, **case, refused=refused)
    each = exchanges(kind, replicas, refused=refused)
    for rank, (seen, count, reports) in enumerate(lab.run(lambda e: train(e, **case), each)):
        assert count == committed
        assert same(seen, wanted[rank])
        fates = ["counted" if report.committed else "dropped" for report in reports]
        assert [report.contribution for report in reports] == fates


@pytest.mark.parametrize("kind", ["store", "sharded"])
def test_one_that_leaves_while_another_is_late_loses_nothing(lab, kind):
    """It may wait for the sync under way once more, and what it has learned counts whole."""
    left, case = threading.Event(), {"fragments": 1, "period": 4, "delay": 3, "alpha": 0.0}
    case |= {"inner": "SGD", "outer": "Nesterov", "steps": 5}
    first, second = exchanges(kind, 2)
    hurry, begin, begun = first.hurry, second.begin, []

    def leave(hurried):
        hurry(hurried)
        threading.Timer(0.5, left.set).start()  # until then it waits for the other one

    def begin_late(job, **given):
        begun.append(job)
        if len(begun) == 2:
            assert left.wait(lab.PATIENCE)
        return begin(job, **given)

    first.hurry, second.begin = leave, begin_late
    wanted, committed = by_the_formulas(2, **case)
    runs = lab.run(lambda exchange: train(exchange, **case), [first, second])
    for rank, (seen, count, _) in enumerate(runs):
        assert count == committed
        assert same(seen, wanted[rank])


@pytest.mark.parametrize("feedback", [{}, {"codec": "int8", "error_feedback": True}])
def test_what_was_sent_is_what_counts_where_the_block_is_left_meanwhile(
    lab, tmp_path, caplog, feedback
):
    """Rank 0 sends two steps, takes one more and leaves; rank 1 contributes once it asks again."""
    asked_again, counted, begun = threading.Event(), threading.Event(), []
    each = [
        connect(tmp_path, rank=rank, world_size=2, min_replicas=2, topology="gather")
        for rank in range(2)
    ]
    begin = each[0].begin

    def begins(job, *, last=False):
        begun.append(job.contribution.steps)
        if len(begun) == 2:
            asked_again.set()
            assert counted.wait(lab.PATIENCE)
        return begin(job, last=last)

    def replica(exchange):
        rank = exchange.rank
        options = {"sync_every": 4, "delay": 2, "save_inner_every": 1, **feedback}
        if rank:
            options["on_sync"] = lambda _: counted.set()
        model, inner, outer, reports = loop(exchange, lab.small_model(), **options)
        with outer:
            for step in range(3 + rank):
                if rank and step == 1:
                    assert asked_again.wait(lab.PATIENCE)
                lab.push(model, inner, rank, step)
        return outer.committed, reports

    each[0].begin = begins
    (committed, (report,)), _ = lab.run(replica, each)
    assert begun[:2] == [(0, 2), (0, 2)], "the same contribution"
    assert (report.contribution, report.inner_steps, report.total_inner_steps) == ("counted", 2, 3)
    assert committed == 1
    assert "error feedback" not in caplog.text
    assert {path.name for path in (tmp_path / "inner" / "00000").iterdir()} == {
        "0001.00000001.safetensors"  # after the sync that counted it
    }


def test_what_is_sent_is_what_the_model_held_then(lab):
    """The exchange looks at the job only after all of the model has changed, its buffers too."""

    def replica(exchange, late):
        gate, begin = threading.Event(), exchange.begin
        gate.set()
        exchange.begin = lambda job, **given: gate.wait(lab.PATIENCE) and begin(job, **given)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        options = {"sync_every": 4, "delay": 3, "alpha": 0.5}
        model, inner, outer, _ = loop(exchange, lab.fill(model), **options)
        seen = []
        with outer:
            for step in range(8):
                if late and step % 4 == 0:
                    gate.clear()
                if step % 4 == 3:
                    assert outer.syncing
                    gate.set()
                model[1].running_mean.add_(1 + exchange.rank + step)
                lab.push(model, inner, exchange.rank, step)
                seen.append(lab.values(model))
        return seen

    at_once = lab.run(lambda exchange: replica(exchange, False), in_process(2))
    late = lab.run(lambda exchange: replica(exchange, True), in_process(2))
    for ours, theirs in zip(late, at_once, strict=True):
        for step in range(8):
            assert lab.identical([ours[step], theirs[step]]), step


@pytest.mark.parametrize("behind", [True, False])
def test_where_another_thread_may_not_begin_a_sync_the_one_that_trains_does(behind):
    (exchange,) = in_process(1)
    begin, threads = exchange.begin, []

    def noted(*arguments, **options):
        threads.append(threading.get_ident())
        return begin(*arguments, **options)

    exchange.support = replace(exchange.support, begins_behind=behind)
    exchange.begin = noted
    model, inner, outer, _ = loop(exchange, delay=1)
    live(model, inner, outer, *range(6))
    # The first one shares the values with which all begin, and the replica waits for it.
    own = [thread == threading.get_ident() for thread in threads]
    assert own[:3] == [True, not behind, not behind]


class TestTrouble:
    """Test what goes wrong while a sync is under way."""

    def replica(self, lab, exchange, before=lambda step, model: None, steps=8, **options):
        """Call a function before every step; return the error, if any, and the step at which."""
        options = {"sync_every": 4, "delay": 3, **options}
        model, inner, outer, _ = loop(exchange, lab.small_model(), **options)
        step = None
        try:
            with outer:
                for step in range(steps):
                    before(step, model)
                    lab.push(model, inner, exchange.rank, step)
        except Exception as error:
            return error, step
        return None, lab.values(model)

    def test_values_that_are_not_finite_are_found_behind_and_raised_at_a_step(self, lab):
        def spoil(step, model):
            model[1].bias.data[0] = torch.inf

        def train(exchange):
            before = [spoil] if exchange.rank == 1 else []
            return self.replica(lab, exchange, *before)

        (lost, _), (own, step) = lab.run(train, in_process(2))
        assert isinstance(own, NonFiniteDeltaError)
        assert step <= 3, "not later than the sync is due"
        assert isinstance(lost, ReplicaLostError)
        assert "rank 1 failed" in str(lost)
        (exchange,) = in_process(1, timing=Timing(in_background=at_once))
        error, step = self.replica(lab, exchange, spoil)
        assert isinstance(error, NonFiniteDeltaError)
        assert step == 1, "the first step has sent it, and the next one raises"

    @pytest.mark.parametrize("kind", ["threads", "store", "sharded"])
    def test_nothing_runs_on_when_the_block_is_left_by_an_error(self, lab, kind):
        """Rank 0 waits for the others behind its training, and its own training ends."""
        met, waiting = threading.Barrier(2), []

        def leave(exchange):
            def before(step, model):
                if exchange.rank or step:
                    if step:
                        waiting.extend(threading.enumerate())
                    met.wait(lab.PATIENCE)
                    raise KeyError("the end")

            return self.replica(lab, exchange, before)

        before = set(threading.enumerate())
        for error, _ in lab.run(leave, exchanges(kind, 2)):
            assert isinstance(error, KeyError)
        assert any(thread.name == "diloco-sync" for thread in waiting)
        left = set(threading.enumerate()) - before
        assert not [thread for thread in left if thread.name == "diloco-sync"]

    @pytest.mark.parametrize("kind", ["threads", "store"])
    def test_the_others_learn_what_has_really_happened(self, lab, kind):
        """Not that the sync under way was given up; their training goes on until it is due."""

        def train(exchange):
            def before(step, model):
                if exchange.rank and step:
                    raise ValueError("no more data")

            return self.replica(lab, exchange, before)

        (first, _), (second, _) = lab.run(train, exchanges(kind, 2))
        assert isinstance(second, ValueError)
        assert isinstance(first, ReplicaLostError)
        assert "no more data" in str(first)

    def test_a_model_that_changes_meanwhile_is_refused(self, lab):
        model = lab.small_model()
        model[0].bias.requires_grad_(False)
        held = lab.values(model)["0.bias"]
        model, inner, outer, _ = loop(model=model, sync_every=4, delay=3)

        def train():
            with outer:
                for step in range(8):
                    lab.push(model, inner, 0, step)
                    if outer.syncing:
                        model[0].bias.requires_grad_(True)
                    assert step < 3, "not later than where the sync is due"

        with pytest.raises(ModelChangedError):
            train()
        assert torch.equal(model[0].bias, held)

    def test_there_is_no_state_to_save_meanwhile(self, lab):
        def replica(exchange):
            saved = []
            options = {"on_sync": lambda _: saved.append(outer.state_dict())}
            model, inner, outer, _ = loop(exchange, sync_every=4, delay=3, **options)
            with outer:
                for step in range(5):
                    lab.push(model, inner, exchange.rank, step)
                    assert outer.syncing == (step % 4 != 3)
                    if outer.syncing:
                        with pytest.raises(SyncError, match="a sync is under way"):
                            outer.state_dict()
            return len(saved)

        # After the period, and of what was under way at the end.
        assert lab.run(replica, in_process(2)) == [2, 2]

    def test_one_that_has_left_before_ends_with_what_both_have(self, lab):
        def train(exchange):
            steps = 4 if exchange.rank else 6
            return self.replica(lab, exchange, steps=steps, flush="none")[1]

        assert lab.identical(lab.run(train, in_process(2)))
