"""The outer learning rate: a number, a function of the sync, or changed in a running run; the same for every replica."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from delay_lab import by_the_formulas, exchanges, train
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strict_lab import Run
from torch import nn

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    MismatchError,
    SyncError,
    in_process,
)
from diloco_core._arithmetic._rate import Proposal, Rate
from diloco_core._exchange._resumable import Position
from diloco_core._loop._counters import Counters
from diloco_core._loop._outer_lr import OuterLr
from diloco_core.testing import (
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    run_replicas,
    simulate,
)
from diloco_core.testing._checks import read_log

KINDS = ("threads", "store", "sharded", "gather")


def schedule_of(name):
    """Functions of the sync; of ``differs``, replicas have each their own, and that of rank 0 counts in strict runs."""
    return {
        "constant": lambda rank: 0.7,
        "falls": lambda rank: lambda sync: 0.9 / sync,
        "differs": lambda rank: lambda sync: 0.5 / (1 + rank) + 0.125 / sync,
    }[name]


def rates(schedule, wishes):
    """The learning rate of every sync by the rules: who asked most recently, and of several at once the greatest rank."""
    open_wishes, standing = dict(wishes), [None]

    def lr_of(sync, taken):
        asked = {key: lr for key, lr in open_wishes.items() if key[1] < taken}
        for key in asked:
            del open_wishes[key]
        if asked:
            rank = max(rank for rank, _ in asked)
            standing[0] = asked[max(key for key in asked if key[0] == rank)]
        if standing[0] is not None:
            return standing[0]
        own = schedule(0)
        return own(sync) if callable(own) else own

    return lr_of


@st.composite
def _cases(draw):
    fragments = draw(st.integers(1, 2))
    period = draw(st.integers(1, 3))
    replicas = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 3 * fragments * period + 2))
    case = {
        "fragments": fragments,
        "period": period,
        "delay": draw(st.integers(0, period - 1)),
        "alpha": draw(st.sampled_from([0.0, 0.5])),
        "inner": "SGD",
        "outer": "Nesterov",
        "steps": steps,
    }
    wishes = draw(
        st.dictionaries(
            st.tuples(st.integers(0, replicas - 1), st.integers(0, steps - 1)),
            st.floats(0.05, 1.5),
            max_size=5,
        )
    )
    return replicas, case, draw(st.sampled_from(["constant", "falls", "differs"])), wishes


TWO_AT_ONCE = {
    "fragments": 1,
    "period": 2,
    "delay": 1,
    "alpha": 0.0,
    "inner": "SGD",
    "outer": "Nesterov",
    "steps": 8,
}


@pytest.mark.parametrize("kind", KINDS)
@given(case=_cases())
@example(case=(2, TWO_AT_ONCE, "falls", {(0, 2): 0.25, (1, 2): 0.5, (0, 4): 0.125}))
@example(case=(2, TWO_AT_ONCE, "constant", {(0, 0): 0.25, (0, 1): 0.5}))
@settings(max_examples=12, deadline=None)
def test_every_step_is_that_of_the_formulas(lab, kind, case):
    replicas, case, name, wishes = case
    if kind in ("sharded", "gather") and name == "differs":
        name = "falls"  # whose function counts depends on who is the last to arrive; see the simulated runs
    schedule = schedule_of(name)
    wanted, committed = by_the_formulas(replicas, **case, lr_of=rates(schedule, wishes))
    runs = lab.run(
        lambda exchange: train(exchange, **case, wishes=wishes, outer_lr=schedule(exchange.rank)),
        exchanges(kind, replicas),
    )
    lr_of, told = rates(schedule, wishes), []
    by_the_formulas(
        replicas, **case, lr_of=lambda sync, taken: told.append(lr_of(sync, taken)) or told[-1]
    )
    for rank, (seen, syncs, reports) in enumerate(runs):
        assert syncs == committed
        assert [report.outer_lr for report in reports] == told
        for values, right in zip(seen, wanted[rank], strict=True):
            for value, expected in zip(values, right, strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


class TestFunctions:
    def test_a_constant_function_is_the_constant(self, lab):
        net = lambda rank: lab.fill(nn.Linear(3, 2))  # noqa: E731
        runs = [
            lab.train(net, in_process(2), steps=6, outer_lr=lr) for lr in (0.3, lambda sync: 0.3)
        ]
        assert lab.identical([*runs[0], *runs[1]])

    def test_the_number_of_the_outer_step(self, lab):
        asked = []

        def replica(exchange):
            model = nn.Linear(2, 1)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            reports = []
            with DiLoCo(
                model,
                inner,
                exchange,
                sync_every=2,
                fragments=[model],
                outer_lr=lambda sync: asked.append(sync) or 1 / sync,
                on_sync=reports.append,
            ):
                for step in range(6):
                    lab.push(model, inner, 0, step)
            return [(report.sync, report.outer_lr) for report in reports]

        assert lab.run(replica, in_process(1)) == [[(1, 1.0), (2, 1 / 2), (3, 1 / 3)]]
        assert asked[-3:] == [1, 2, 3]

    def test_with_another_outer_optimizer(self, lab):
        """The function takes the place of the rate that the optimizer was made with."""
        net = lambda rank: lab.fill(nn.Linear(3, 2))  # noqa: E731
        adam = lambda lr: lambda parameters: torch.optim.Adam(parameters, lr=lr)  # noqa: E731
        (wanted,), (held,) = (
            lab.train(net, in_process(1), outer_optimizer=adam(lr), **more)
            for lr, more in ((0.2, {}), (0.9, {"outer_lr": lambda sync: 0.2}))
        )
        assert lab.identical([wanted, held])

    def test_a_rate_that_the_optimizer_keeps_as_a_tensor(self, lab):
        net = lambda rank: lab.fill(nn.Linear(3, 2))  # noqa: E731

        def adam(lr):
            return lambda parameters: torch.optim.Adam(
                parameters, lr=torch.tensor(lr), foreach=False
            )

        (wanted,), (held,) = (
            lab.train(net, in_process(1), outer_optimizer=adam(lr), **more)
            for lr, more in ((0.2, {}), (0.9, {"outer_lr": lambda sync: 0.2}))
        )
        assert lab.identical([wanted, held])


class NoRate(torch.optim.Optimizer):
    """Subtracts the gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


def loop(exchange=None, **options):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = exchange or in_process(1)[0]
    return model, inner, DiLoCo(model, inner, exchange, **{"sync_every": 1, **options})


def fails(sync):
    raise LookupError("no such sync")


class TestBadInput:
    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (fails, r"outer_lr\(1\) raised LookupError: no such sync"),
            (lambda: 1.0, r"outer_lr\(1\) raised TypeError"),
            (lambda sync: 0.0, r"what outer_lr\(1\) returns must be positive, not 0.0"),
            (lambda sync: -1, r"what outer_lr\(1\) returns must be positive, not -1.0"),
            (lambda sync: math.nan, r"what outer_lr\(1\) returns must be a finite number, not nan"),
            (lambda sync: math.inf, r"what outer_lr\(1\) returns must be a finite number, not inf"),
            (lambda sync: None, r"what outer_lr\(1\) returns must be a finite number, not None"),
            (lambda sync: True, r"what outer_lr\(1\) returns must be a finite number, not True"),
        ],
    )
    def test_a_function_that_cannot_be_used_is_refused_when_the_loop_is_made(self, function, named):
        with pytest.raises(ConfigurationError, match=named):
            loop(outer_lr=function)

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_that_fails_later_names_the_sync_and_nothing_is_sent(self, kind, lab):
        """All replicas fail, by the same error, with the values that they had."""

        def replica(exchange):
            model, inner, outer = loop(exchange, outer_lr=lambda sync: 0.5 if sync < 3 else "x")

            def train():
                with outer:
                    for step in range(4):
                        lab.push(model, inner, 0, step)

            with pytest.raises(ConfigurationError, match=r"what outer_lr\(3\) returns"):
                train()
            return outer.committed

        assert lab.run(replica, exchanges(kind, 2)) == [2, 2]

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (0, "must be positive, not 0.0"),
            (-0.1, "must be positive"),
            (math.nan, "must be a finite number, not nan"),
            ("0.5", "must be a finite number, not '0.5'"),
            (None, "must be a finite number, not None"),
            (lambda sync: 1.0, "must be a finite number"),
        ],
    )
    def test_a_rate_that_cannot_be_used_is_refused_and_the_run_goes_on(self, value, named, lab):
        model, inner, outer = loop()
        with outer:
            with pytest.raises(ConfigurationError, match=f"the outer learning rate {named}"):
                outer.set_outer_lr(value)
            lab.push(model, inner, 0, 0)
        assert outer.committed == 1

    def test_outside_of_the_block(self, lab):
        model, inner, outer = loop()
        with pytest.raises(SyncError, match="inside the block"):
            outer.set_outer_lr(0.5)
        with outer:
            lab.push(model, inner, 0, 0)
        with pytest.raises(SyncError, match="inside the block"):
            outer.set_outer_lr(0.5)

    def test_an_optimizer_without_a_learning_rate(self):
        with pytest.raises(ConfigurationError, match="NoRate has no learning rate"):
            loop(outer_optimizer=NoRate, outer_lr=lambda sync: 0.5)
        outer = loop(outer_optimizer=NoRate)[2]
        with (
            outer,
            pytest.raises(ConfigurationError, match=r"set_outer_lr\(\) was called.*NoRate has no"),
        ):
            outer.set_outer_lr(0.5)

    def test_a_number_together_with_an_optimizer_is_refused_as_before(self):
        with pytest.raises(ConfigurationError, match=r"outer_lr=0.5 cannot be given together"):
            loop(outer_optimizer=torch.optim.SGD, outer_lr=0.5)

    def test_an_optimizer_that_the_caller_changes_by_hand(self, lab):
        """The change would be undone by the next outer step, and in no record."""
        made = []

        def keeps(parameters):
            made.append(torch.optim.SGD(parameters, lr=0.5))
            return made[-1]

        model, inner, outer = loop(outer_optimizer=keeps, outer_lr=lambda sync: 0.5 / sync)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                made[-1].param_groups[0]["lr"] = 0.9
                lab.push(model, inner, 0, 1)

        with pytest.raises(ConfigurationError, match=r"outer_lr is 0\.9 for fragment 0"):
            train()

    def test_a_number_here_and_a_function_there(self, lab):
        def replica(exchange):
            with loop(exchange, outer_lr=[0.5, lambda sync: 0.5][exchange.rank])[2]:
                pass

        for error in run_replicas(replica, in_process(2)):
            assert isinstance(error, MismatchError)
            assert "setting 'outer_lr'" in str(error)
            assert "a function of the sync" in str(error)


class TestManagers:
    def test_a_function_that_is_the_same_everywhere(self, lab):
        case = {**TWO_AT_ONCE, "delay": 0}
        schedule = schedule_of("falls")
        wanted, committed = by_the_formulas(2, **case, lr_of=rates(schedule, {}))
        runs = lab.run(
            lambda exchange: train(exchange, **case, outer_lr=schedule(0)), exchanges("manager", 2)
        )
        for (seen, syncs, _), right in zip(runs, wanted, strict=True):
            assert syncs == committed
            torch.testing.assert_close(seen[-1], right[-1], rtol=1e-12, atol=1e-12)

    def test_functions_that_differ_are_refused_at_the_sync_at_which_they_do(self, lab):
        def replica(exchange):
            model, inner, outer = loop(
                exchange,
                outer_lr=lambda sync: 0.5 if sync < 3 else 0.25 + exchange.rank,
                init="check",
            )
            lab.fill(model)

            def train():
                with outer:
                    for step in range(6):
                        lab.push(model, inner, 0, step)

            with pytest.raises(MismatchError, match="differ in the outer learning rate") as told:
                train()
            return outer.committed, f"{0.25 + exchange.rank} for outer step 3" in str(told.value)

        assert lab.run(replica, exchanges("manager", 2)) == [(2, True)] * 2

    def test_a_change_cannot_be_told_to_the_others(self, lab):
        def replica(exchange):
            model, inner, outer = loop(exchange)
            with outer:
                with pytest.raises(ConfigurationError, match="ManagerExchange, by which the other"):
                    outer.set_outer_lr(0.5)
                lab.push(model, inner, 0, 0)

        lab.run(replica, exchanges("manager", 2))


class TestChanges:
    def replica(self, exchange, lab, wishes, steps=4, **options):
        model, inner, outer = loop(exchange, **options)
        with outer:
            for step in range(steps):
                if (exchange.rank, step) in wishes:
                    outer.set_outer_lr(wishes[exchange.rank, step])
                lab.push(model, inner, exchange.rank, step)

    def test_the_other_of_two_is_told(self, lab, caplog):
        wishes = {(0, 1): 0.25, (1, 1): 0.5}
        lab.run(lambda exchange: self.replica(exchange, lab, wishes), in_process(2))
        (told,) = [record.message for record in caplog.records if "set_outer_lr" in record.message]
        assert told.startswith(
            "rank 0: set_outer_lr() was called on this replica and asked for 0.25, but the run takes 0.5, which rank 1 has"
        )

    def test_two_that_want_the_same_are_told_nothing(self, lab, caplog):
        wishes = {(0, 1): 0.5, (1, 1): 0.5}
        lab.run(lambda exchange: self.replica(exchange, lab, wishes), in_process(2))
        assert "set_outer_lr" not in caplog.text

    def test_nothing_comes_after_it(self, lab, caplog):
        def replica(exchange):
            model, inner, outer = loop(exchange)
            with outer:
                lab.push(model, inner, 0, 0)
                outer.set_outer_lr(0.5)

        lab.run(replica, in_process(1))
        assert (
            "set_outer_lr(0.5) was called, but this replica has contributed to no sync"
            in caplog.text
        )

    def test_it_may_be_called_where_the_report_comes(self, lab):
        """Also in the report of the last sync, where it has no effect any more."""
        rates = []

        def replica(exchange):
            model = nn.Linear(2, 1)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)

            def halve(report):
                rates.append(report.outer_lr)
                outer.set_outer_lr(report.outer_lr / 2)

            outer = DiLoCo(model, inner, exchange, sync_every=2, outer_lr=0.5, on_sync=halve)
            with outer:
                for step in range(5):
                    lab.push(model, inner, 0, step)

        lab.run(replica, in_process(1))
        assert rates == [0.5, 0.25, 0.125]


class TestOpenWishes:
    """What becomes of a wish when the rate of an outer step is known."""

    LAST = Rate((0.7,), 2, 1)

    def asked(self, *values):
        """Rank 0 has asked for these rates, one after another, and has sent each but the last."""
        lr = OuterLr((0.7,), None, 0)
        for value in values:
            lr.ask(value)
            assert lr.propose(self.LAST, 5) == Proposal(self.LAST, (value,))
        return lr

    def open(self, lr, last=None):
        return lr.propose(last or self.LAST, 6).wish

    @pytest.mark.parametrize("rate", [LAST, Rate((0.9,)), Rate((0.5,), 2, 0)])
    def test_a_step_that_knows_of_no_new_one_leaves_it_open(self, rate, caplog):
        lr = self.asked(0.5)
        lr.settle(rate)
        assert self.open(lr) == (0.5,)
        assert caplog.records == []

    @pytest.mark.parametrize("number", [3, 4])
    def test_it_is_over_when_it_was_heard(self, number, caplog):
        lr = self.asked(0.5)
        lr.settle(Rate((0.5,), number, 0, 7))
        assert self.open(lr) == ()
        lr.end()
        assert caplog.records == []

    def test_another_that_wants_the_same_is_no_news(self, caplog):
        lr = self.asked(0.5)
        lr.settle(Rate((0.5,), 3, 1))
        assert self.open(lr) == ()
        assert caplog.records == []

    @pytest.mark.parametrize(("number", "rank"), [(3, 1), (4, 1), (4, 0)])
    def test_it_is_over_and_said_when_another_was_heard(self, number, rank, caplog):
        lr = self.asked(0.5)
        lr.settle(Rate((0.25,), number, rank))
        assert self.open(lr) == ()
        (told,) = [record.message for record in caplog.records]
        assert f"the run takes 0.25, which rank {rank} has asked for" in told

    def test_a_later_wish_stands_when_an_earlier_one_was_heard(self, caplog):
        """The first was sent under the same number, and the sync that it was for has taken it."""
        lr = self.asked(0.5, 0.25)
        heard = Rate((0.5,), 3, 0)
        lr.settle(heard)
        lr.settle(Rate((0.9,), 5, 1))  # it has not been sent since, so this is no answer
        assert lr.propose(heard, 6) == Proposal(heard, (0.25,))
        lr.settle(heard)
        assert self.open(lr, heard) == (0.25,), "it was sent under the next number, and not heard"
        lr.settle(Rate((0.25,), 4, 0))
        assert self.open(lr) == ()
        assert caplog.records == []

    def test_one_that_was_not_sent_yet_stands_whatever_comes(self, caplog):
        lr = OuterLr((0.7,), None, 0)
        lr.ask(0.5)
        lr.settle(Rate((0.25,), 9, 1))
        assert self.open(lr) == (0.5,)
        lr.ask(0.4)
        lr.settle(Rate((0.5,), 10, 0))
        assert self.open(lr) == (0.4,)
        assert caplog.records == []

    def test_nothing_is_said_of_what_was_never_asked_for(self, caplog):
        lr = OuterLr((0.7,), None, 0)
        lr.propose(self.LAST, 5)
        lr.settle(Rate((0.25,), 9, 1))
        lr.end()
        assert caplog.records == []


def test_where_a_replica_stands_in_an_elastic_run_is_the_rate_too():
    count = Counters([3, 2], inner_steps=9)
    rate = Rate((0.25,), 2, 1, 4)
    count.stand_at(Position(7, 5, 6, rate=rate))
    assert (count.committed, count.given_up, count.decisions) == (5, 2, 7)
    assert count.rate == rate
    assert count.inner_steps == 9


def test_a_wish_of_a_life_that_has_just_come_is_not_taken_for_overruled():
    """The run's rate was changed before it came. Its first sync is decided without it, with that rate, and is no answer."""
    store, settings = SimulatedStore(), Elastic(1, grace=3.0, topology="sharded", retention=9)
    first = SimulatedTraining(syncs=2, sizes=(4,), wishes={(0, 1, 0): 0.5})
    simulate(first, Schedule(2), settings, store=store)
    second = SimulatedTraining(
        syncs=10,
        sizes=(4,),
        salts=dict(first.salts),
        pauses={(0, 4): 7.0},
        wishes={(0, 1, 4): 0.25},
    )
    simulate(second, Schedule(2), replace(settings, resume=True), store=store)
    records = read_log(store)[0][2:]
    out = [0 in {member.rank for member in record.members} for record in records]
    assert out[0] is False
    back = out.index(True)
    values = [record.rate.values[0] for record in records]
    assert values == [0.5] * back + [0.25] * (len(values) - back)


class TestGoingOn:
    @pytest.mark.parametrize("fragments", [1, 2])
    def test_a_strict_run_that_is_resumed_keeps_the_rate_that_was_asked_for(self, fragments):
        """The function of the process that resumes it is not asked any more."""
        wishes = {(1, 2): 0.25}
        options = {"outer_lr": lambda sync: 0.9 / sync}
        wanted = Run(2, fragments, options=options, wishes=wishes).live()
        run = Run(2, fragments, options=options, wishes=wishes)
        run.live(until=4)
        run.options = {"outer_lr": lambda sync: 0.01}
        run.wishes = {}
        for held in run.live(resume=True):
            assert all(torch.equal(held[name], wanted[0][name]) for name in held)

    def test_before_any_wish_a_resumed_run_takes_what_its_new_function_returns(self):
        other = lambda sync: 0.9 if sync <= 4 else 0.3  # noqa: E731
        wanted = Run(2, options={"outer_lr": other}).live()
        run = Run(2, options={"outer_lr": lambda sync: 0.9})
        run.live(until=4)
        run.options = {"outer_lr": lambda sync: 0.3}
        for held in run.live(resume=True):
            assert all(torch.equal(held[name], wanted[0][name]) for name in held)

    def test_a_loaded_loop_keeps_the_rate(self, lab):
        wishes = {(0, 1): 0.25}

        def replica(exchange, state=None, start=0, stop=4):
            model = lab.fill(nn.Linear(3, 2))
            if state:
                model.load_state_dict(state[0])
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            outer = DiLoCo(model, inner, exchange, sync_every=2, outer_lr=0.5)
            if state:
                outer.load_state_dict(state[1])
            with outer:
                for step in range(start, stop):
                    if (exchange.rank, step) in wishes:
                        outer.set_outer_lr(wishes[exchange.rank, step])
                    lab.push(model, inner, exchange.rank, step)
                return copy.deepcopy((model.state_dict(), outer.state_dict()))

        wanted = lab.run(replica, in_process(2))
        stopped = lab.run(lambda exchange: replica(exchange, stop=2), in_process(2))
        held = lab.run(
            lambda exchange: replica(exchange, stopped[exchange.rank], 2, 4), in_process(2)
        )
        assert lab.identical([model for model, _ in [*wanted, *held]])

    @pytest.mark.parametrize("state", ["", "0-0-0000000000000000", None, 0.5, "1-0"])
    def test_a_saved_state_without_a_rate_that_can_be_used(self, state, lab):
        model, inner, outer = loop()
        with outer:
            lab.push(model, inner, 0, 0)
            saved = outer.state_dict()
        with pytest.raises(ConfigurationError, match="saved state of the outer loop"):
            loop()[2].load_state_dict({**saved, "outer_lr": state})

    def test_another_constant_is_refused(self):
        run = Run(1, options={"outer_lr": 0.5})
        run.live(until=2)
        run.options = {"outer_lr": 0.25}
        (error,) = run.live(resume=True)
        assert "was begun with outer_lr=0.5, but rank 0 was given outer_lr=0.25" in str(error)

    @pytest.mark.parametrize("topology", ["sharded", "gather"])
    def test_an_elastic_run_that_is_resumed_replays_what_is_recorded(self, topology):
        """Its two lives have functions of their own; in the simulated runs, so have all lives."""
        store, settings = SimulatedStore(), Elastic(2, topology=topology, publish_every=3)
        first = SimulatedTraining(syncs=5, sizes=(40,), lr=lambda rank, life, sync: 0.9 / sync)
        simulate(first, Schedule(2), settings, store=store)
        second = SimulatedTraining(
            syncs=8,
            sizes=(40,),
            lr=lambda rank, life, sync: 0.125 if sync > 5 else 0.01,
            salts=dict(first.salts),
            wishes={(1, 1, 13): 0.5},
        )
        outcome = simulate(second, Schedule(2), replace(settings, resume=True), store=store)
        log, _ = read_log(store)
        assert [record.rate.values[0] for record in log][:6] == [0.9, 0.45, 0.3, 0.225, 0.18, 0.125]
        assert log[-1].rate.values == (0.5,)
        assert outcome.errors() == {}
