"""Syncs that go on while the replicas train: sent ``delay`` steps before they are adopted, and
mixed by ``alpha``.
"""

import threading

import pytest
import torch
from delay_lab import INNER, OUTER, by_the_formulas, exchanges, train
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco_core import (
    ConfigurationError,
    CoreError,
    DiLoCo,
    MismatchError,
    ModelChangedError,
    NonFiniteDeltaError,
    ReplicaLostError,
    StoreExchange,
    SyncError,
    Timing,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core._terms._support import Support
from diloco_core.testing import run_replicas


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
    runs = lab.run(lambda exchange: train(exchange, **case), exchanges(kind, replicas, refused))
    for rank, (seen, count, reports) in enumerate(runs):
        assert count == committed
        assert same(seen, wanted[rank])
        assert all(
            report.contribution == ("counted" if report.committed else "dropped")
            for report in reports
        )


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


class Late:
    """An exchange that does nothing until the loop says so, like the slowest of networks."""

    def __init__(self, exchange):
        self._exchange = exchange
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self._exchange, name)

    def begin(self, job, **given):
        assert self.gate.wait(600)
        return self._exchange.begin(job, **given)


def test_what_is_sent_is_what_the_model_held_then(lab):
    """The exchange looks at the job only after all of the model has changed, its buffers too."""

    def replica(exchange, late):
        exchange = Late(exchange)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        lab.fill(model)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with DiLoCo(model, inner, exchange, sync_every=4, delay=3, alpha=0.5) as outer:
            for step in range(8):
                if late and step % 4 == 0:
                    exchange.gate.clear()
                if step % 4 == 3:
                    assert outer.syncing
                    exchange.gate.set()
                model[1].running_mean.add_(1 + exchange.rank + step)
                lab.push(model, inner, exchange.rank, step)
                seen.append(lab.values(model))
        return seen

    at_once = lab.run(lambda exchange: replica(exchange, False), in_process(2))
    late = lab.run(lambda exchange: replica(exchange, True), in_process(2))
    for ours, theirs in zip(late, at_once, strict=True):
        for step in range(8):
            assert lab.identical([ours[step], theirs[step]]), step


def at_once(act):
    """For replicas that are alone: in the background, but ended before the training goes on."""
    act()
    return lambda _: True


def options(**given):
    return {"sync_every": 4, "delay": 3, **given}


class TestTrouble:
    """What goes wrong while a sync is under way."""

    def test_values_that_are_not_finite_are_found_behind_and_raised_at_a_step(self, lab):
        def replica(exchange):
            model, steps = lab.small_model(), 0
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                with DiLoCo(model, inner, exchange, **options()):
                    for steps in range(8):
                        if steps == 0 and exchange.rank == 1:
                            with torch.no_grad():
                                model[1].bias[0] = torch.inf
                        lab.push(model, inner, exchange.rank, steps)
            except Exception as error:
                return error, steps
            return None, steps

        (lost, _), (own, step) = lab.run(replica, in_process(2))
        assert isinstance(own, NonFiniteDeltaError)
        assert step <= 3, "not later than the sync is due"
        assert isinstance(lost, ReplicaLostError)
        assert "rank 1 failed" in str(lost)

    def test_a_failure_is_raised_at_the_step_after_it(self, lab):
        (exchange,) = in_process(1, timing=Timing(in_background=at_once))
        model, taken = lab.small_model(), 0
        inner = torch.optim.SGD(model.parameters(), lr=0.1)

        def train():
            nonlocal taken
            with DiLoCo(model, inner, exchange, **options()):
                model[1].bias.data[0] = torch.inf
                for taken in range(4):
                    lab.push(model, inner, 0, taken)

        with pytest.raises(NonFiniteDeltaError):
            train()
        assert taken == 1, "the first step has sent it"

    @pytest.mark.parametrize("kind", ["store"])
    def test_the_others_learn_what_has_really_happened(self, lab, kind):
        """Not that the sync under way was given up."""
        met = threading.Barrier(2)

        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, **options()):
                if exchange.rank:
                    met.wait(lab.PATIENCE)
                lab.push(model, inner, exchange.rank, 0)
                if not exchange.rank:
                    met.wait(lab.PATIENCE)
                    raise KeyError("the end")
                for step in range(1, 8):
                    lab.push(model, inner, exchange.rank, step)

        first, second = run_replicas(replica, exchanges(kind, 2))
        assert isinstance(first, KeyError)
        assert isinstance(second, ReplicaLostError)
        assert "KeyError" in str(second)

    @pytest.mark.parametrize("kind", ["threads", "store", "sharded"])
    def test_nothing_runs_on_when_the_block_is_left_by_an_error(self, lab, kind):
        """Rank 0 waits for the others behind its training, and its own training ends."""
        met = threading.Barrier(2)

        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, **options()) as outer:
                if exchange.rank:
                    met.wait(lab.PATIENCE)  # takes no step
                else:
                    lab.push(model, inner, 0, 0)
                    assert outer.syncing
                    waiting.append(threading.enumerate())
                    met.wait(lab.PATIENCE)
                raise KeyError("the end")

        waiting = []
        before = set(threading.enumerate())
        for result in run_replicas(replica, exchanges(kind, 2)):
            assert isinstance(result, KeyError)
        assert any(thread.name == "diloco-sync" for thread in waiting[0])
        assert not [
            thread
            for thread in threading.enumerate()
            if thread.name == "diloco-sync" and thread not in before
        ]

    def test_the_one_that_is_waited_for_fails(self, lab):
        """Its error reaches the others, whose training goes on as long as nothing is due."""

        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, **options()):
                for step in range(8):
                    if exchange.rank and not step:
                        raise ValueError("no more data")
                    lab.push(model, inner, exchange.rank, step)

        first, second = run_replicas(replica, in_process(2))
        assert isinstance(second, ValueError)
        assert isinstance(first, ReplicaLostError)

    def test_an_error_that_is_caught_ends_the_loop_all_the_same(self, lab):
        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            failures = []
            with DiLoCo(model, inner, exchange, **options()):
                for step in range(8):
                    if exchange.rank and not step:
                        with torch.no_grad():
                            model[0].weight.fill_(torch.nan)
                    try:
                        lab.push(model, inner, exchange.rank, step)
                    except CoreError as error:
                        failures.append(error)
            return failures

        for result in run_replicas(replica, in_process(2)):
            assert isinstance(result, SyncError)
            assert "an earlier sync of this outer loop has failed" in str(result)

    def test_a_model_that_changes_meanwhile_is_refused(self, lab):
        def replica(exchange):
            model = lab.small_model()
            model[0].bias.requires_grad_(False)
            inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
            inner.add_param_group({"params": [model[0].weight]})
            held = None
            try:
                with DiLoCo(model, inner, exchange, **options()) as outer:
                    for step in range(8):
                        held = lab.values(model)
                        lab.push(model, inner, exchange.rank, step)
                        if outer.syncing:
                            model[0].bias.requires_grad_(True)
            except ModelChangedError:
                return step, lab.values(model), held
            return None

        for step, values, held in lab.run(replica, in_process(2)):
            assert step == 3, "where the sync is due"
            assert torch.equal(values["0.bias"], held["0.bias"])

    def test_there_is_no_state_to_save_meanwhile(self, lab):
        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            saved = []
            with DiLoCo(
                model,
                inner,
                exchange,
                **options(on_sync=lambda _: saved.append(outer.state_dict())),
            ) as outer:
                for step in range(5):
                    lab.push(model, inner, exchange.rank, step)
                    assert outer.syncing == (step % 4 != 3)
                    if outer.syncing:
                        with pytest.raises(SyncError, match="a sync is under way"):
                            outer.state_dict()
            return saved

        for saved in lab.run(replica, in_process(2)):
            assert len(saved) == 2, "after the period, and of what was under way at the end"

    def test_a_replica_with_fewer_steps(self, lab):
        """It has left before the sync that the other one has sent: both end with what both have."""

        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, **options(flush="none")):
                for step in range(4 if exchange.rank else 6):
                    lab.push(model, inner, exchange.rank, step)
            return lab.values(model)

        assert lab.identical(lab.run(replica, in_process(2)))


class TestRefusals:
    def test_numbers_that_do_not_fit(self, lab):
        model = lab.small_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        (exchange,) = in_process(1)
        for wrong, message in [
            ({"delay": 2, "fragments": 2}, "delay is 2, but it must be less than 2"),
            ({"delay": -1}, "delay must be"),
            ({"delay": 1.0}, "delay must be"),
            ({"delay": True}, "delay must be"),
            ({"alpha": 1.01}, "alpha is 1.01, but it must be a number from 0"),
            ({"alpha": -0.1}, "alpha is -0.1"),
            ({"alpha": float("nan")}, "alpha is nan"),
            ({"alpha": "half"}, "alpha is 'half'"),
            ({"alpha": True}, "alpha is True"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                DiLoCo(model, inner, exchange, **{"sync_every": 4, **wrong})

    @pytest.mark.parametrize("given", [{"delay": 1}, {"alpha": 0.5}])
    def test_an_exchange_that_cannot_sync_while_its_replica_trains(self, lab, given):
        class Plain(type(in_process(1)[0])):
            pass

        (exchange,) = in_process(1)
        exchange.__class__, exchange.support = Plain, Support()
        model = lab.small_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match="cannot be used with Plain"):
            DiLoCo(model, inner, exchange, sync_every=4, **given)

    @pytest.mark.parametrize("name", ["delay", "alpha"])
    @pytest.mark.parametrize("kind", ["threads", "store", "sharded"])
    def test_replicas_that_differ(self, lab, name, kind):
        def replica(exchange):
            model = lab.small_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCo(model, inner, exchange, sync_every=4, **{name: exchange.rank}):
                pass

        results = run_replicas(replica, exchanges(kind, 2))
        assert any(isinstance(result, MismatchError) and name in str(result) for result in results)


class TestResuming:
    """Fixed runs over a store that have stopped."""

    STEPS = 13

    def incarnation(self, lab, exchange, until, *, stop=False, **given):
        """Train up to a number of inner steps; ``stop`` ends as a process that is killed.

        What the model held after each step.
        """
        model = lab.fill(lab.small_model())
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        seen = {}
        chosen = {"sync_every": 6, "fragments": 2, "save_inner_every": 1, "alpha": 0.5, **given}
        try:
            with DiLoCo(model, inner, exchange, **chosen) as outer:
                while outer.inner_steps < until:
                    lab.push(model, inner, exchange.rank, outer.inner_steps)
                    seen[outer.inner_steps] = lab.values(model)
                if stop:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        return seen, lab.values(model)

    @pytest.mark.parametrize(("delay", "stop"), [(0, 4), (1, 4), (1, 7), (2, 3), (2, 6)])
    def test_where_nothing_is_under_way_it_goes_on_as_if_not_stopped(self, lab, delay, stop):
        def whole(exchange):
            return self.incarnation(lab, exchange, self.STEPS, delay=delay)

        place = f"memory://delay/resume/{delay}/{stop}"

        def opened(rank, resume):
            return StoreExchange(open_store(place), rank, 2, resume=resume)

        wanted = lab.run(whole, exchanges("store", 2))
        lab.run(
            lambda exchange: self.incarnation(lab, exchange, stop, stop=True, delay=delay),
            [opened(rank, False) for rank in range(2)],
        )
        runs = lab.run(
            lambda exchange: self.incarnation(lab, exchange, self.STEPS, delay=delay),
            [opened(rank, True) for rank in range(2)],
        )
        for (steps, end), (wanted_steps, wanted_end) in zip(runs, wanted, strict=True):
            for step, held in steps.items():
                assert lab.identical([held, wanted_steps[step]]), step
            assert lab.identical([end, wanted_end])

    @pytest.mark.parametrize("stop", [2, 5, 8, 11])
    def test_where_a_sync_is_under_way_all_go_on_from_the_same_state(self, lab, stop):
        """Whether the sync is in the state depends on how far it came."""
        place = f"memory://delay/under-way/{stop}"

        def opened(rank, resume):
            return StoreExchange(open_store(place), rank, 2, resume=resume)

        lab.run(
            lambda exchange: self.incarnation(lab, exchange, stop, stop=True, delay=2),
            [opened(rank, False) for rank in range(2)],
        )
        runs = lab.run(
            lambda exchange: self.incarnation(lab, exchange, self.STEPS, delay=2),
            [opened(rank, True) for rank in range(2)],
        )
        assert lab.identical([end for _, end in runs])
        for steps, _ in runs:
            assert min(steps) <= stop + 1, "no step is skipped"
