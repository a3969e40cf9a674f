"""The outer learning rate: a number, a function of the sync, or changed in a running run."""

import itertools
import json
import math
from dataclasses import replace

import keys_lab
import pytest
import torch
from delay_lab import by_the_formulas, train
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loop_lab import KINDS, exchanges, live, loop
from simulated import Schedule, SimulatedStore, SimulatedTraining, read_log, simulate
from strict_lab import Generations, Run
from torch import nn
from training_lab import identical

from diloco_core import ConfigurationError, Elastic, MismatchError, SyncError, in_process
from diloco_core._run._records._keys import Delta


def schedule_of(name):
    """Functions of the sync; those of ``differs`` are others at every rank."""
    return {
        "constant": lambda rank: 0.7,
        "falls": lambda rank: lambda sync: 0.9 / sync,
        "differs": lambda rank: lambda sync: 0.5 / (1 + rank) + 0.125 / sync,
    }[name]


def rates(schedule, wishes):
    """The rate of every sync by the rules: who asked last, and of several the greatest rank."""
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
        **TWO_AT_ONCE, "fragments": fragments, "period": period, "steps": steps,
        "delay": draw(st.integers(0, period - 1)), "alpha": draw(st.sampled_from([0.0, 0.5])),
    }  # fmt: skip
    when = st.tuples(st.integers(0, replicas - 1), st.integers(0, steps - 1))
    wishes = draw(st.dictionaries(when, st.floats(0.05, 1.5), max_size=5))
    return replicas, case, draw(st.sampled_from(["constant", "falls", "differs"])), wishes


TWO_AT_ONCE = {
    "fragments": 1, "period": 2, "delay": 1, "alpha": 0.0, "inner": "SGD", "outer": "Nesterov",
    "steps": 8,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@given(case=_cases())
@example(case=(2, TWO_AT_ONCE, "falls", {(0, 2): 0.25, (1, 2): 0.5, (0, 4): 0.125}))
@example(case=(2, TWO_AT_ONCE, "constant", {(0, 0): 0.25, (0, 1): 0.5}))
@example(case=(3, TWO_AT_ONCE, "differs", {}))
@settings(max_examples=12, deadline=None)
def test_every_step_is_that_of_the_formulas(lab, kind, case):
    replicas, case, name, wishes = case
    if kind in ("sharded", "gather") and name == "differs":
        # Whose function counts depends on who is the last to arrive; see the simulated runs
        name = "falls"
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


def test_a_function_takes_the_place_of_the_rate_that_the_optimizer_was_made_with(lab):
    def held(lr, **options):
        adam = lambda given: torch.optim.Adam(given, lr=torch.tensor(lr), foreach=False)  # noqa: E731
        made = lambda rank: lab.fill(nn.Linear(3, 2))  # noqa: E731
        return lab.train(made, in_process(2), steps=6, outer_optimizer=adam, **options)

    assert lab.identical([*held(0.2), *held(0.9, outer_lr=lambda sync: 0.2)])


def test_over_a_manager_functions_that_differ_are_refused_at_the_sync_at_which_they_do(lab):
    def replica(exchange):
        rate = lambda sync: 0.5 if sync < 3 else 0.25 + exchange.rank  # noqa: E731
        model, inner, outer, _ = loop(exchange, outer_lr=rate, sync_every=1)

        def go():
            live(model, inner, outer, *range(6))

        with pytest.raises(MismatchError, match="differ in the outer learning rate") as told:
            go()
        return outer.committed, f"{0.25 + exchange.rank} for outer step 3" in str(told.value)

    assert lab.run(replica, exchanges("manager", 2)) == [(2, True)] * 2


@pytest.mark.parametrize("kind", [Run, Generations])
def test_whoever_writes_the_record_of_a_fixed_run_writes_the_same_rate(kind):
    """Where the store cannot decide, several ranks may write it, but must use the same rates."""
    returned = itertools.count(1)
    options = {"outer_lr": lambda sync: 0.9 + 1 / next(returned)}
    for seed in range(3):
        run = kind(3, options=options)
        assert identical(run.live(seed=seed))
        found = run.store.objects
        records = [json.loads(found[key]) for key in keys_lab.keys_of(found, "commit")]
        assert len(records) == run.syncs
        for record in records:
            named = Delta.parse(record["members"][0]["key"])
            assert (named.rank, [named.rate]) == (0, record["outer_lr"])
        assert getattr(run.store, "differing", []) == []


@pytest.mark.sampled
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("wishes", [{(1, 2): 0.25}, {}])
def test_a_fixed_run_that_is_resumed(fragments, wishes):
    """It keeps the rate that was asked for; before any wish it asks its new function."""
    first, later = (lambda sync: 0.9 / sync), (lambda sync: 0.3)
    whole = first if wishes else lambda sync: first(sync) if sync <= 4 else later(sync)
    wanted = Run(2, fragments, options={"outer_lr": whole}, wishes=wishes).live()
    run = Run(2, fragments, options={"outer_lr": first}, wishes=wishes)
    run.live(until=4)
    run.options, run.wishes = {"outer_lr": later}, {}
    assert identical([*run.live(resume=True), *wanted])


def asking(lab, exchange, wishes, steps=4, **options):
    """Ask for rates before some steps, by (rank, step); return those of the syncs."""
    model, inner, outer, reports = loop(exchange, **{"sync_every": 1, "outer_lr": 0.7, **options})
    with outer:
        for step in range(steps):
            for value in wishes.get((exchange.rank, step), ()):
                outer.set_outer_lr(value)
            lab.push(model, inner, exchange.rank, step)
    return [report.outer_lr for report in reports]


@pytest.mark.parametrize(
    ("wishes", "rates", "words"),
    [
        # Of two the one with the greater rank is heard, and the other is told.
        ({(0, 1): [0.25], (1, 1): [0.5]}, [0.7, 0.5, 0.5, 0.5], ["rank 0", "0.25", "takes 0.5"]),
        ({(0, 1): [0.5], (1, 1): [0.5]}, [0.7, 0.5, 0.5, 0.5], []),
        # The last word of a replica counts, whatever it has asked for before.
        ({(0, 1): [0.25, 0.5, 0.3]}, [0.7, 0.3, 0.3, 0.3], []),
        ({(0, 1): [0.25], (0, 2): [0.5], (1, 2): [0.4]}, [0.7, 0.25, 0.4, 0.4], ["rank 0", "0.5"]),
        ({(1, 1): [0.25], (0, 2): [0.5]}, [0.7, 0.25, 0.5, 0.5], []),
    ],
)
def test_who_is_heard_and_who_is_told(lab, caplog, wishes, rates, words):
    results = lab.run(lambda exchange: asking(lab, exchange, wishes), in_process(2))
    assert results == [rates, rates]
    messages = [text for text in caplog.messages if "set_outer_lr() was called" in text]
    assert len(messages) == bool(words)
    assert all(part in messages[0] for part in words)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_wish_while_a_sync_is_under_way_is_for_the_next_one(lab, caplog, kind):
    """An earlier one that travels with that sync is heard, and the later one is not lost."""
    wishes = {(0, 0): [0.25], (0, 1): [0.5]}
    results = lab.run(
        lambda each: asking(lab, each, wishes, 6, sync_every=2, delay=1), exchanges(kind, 2)
    )
    assert results == [[0.25, 0.5, 0.5]] * 2
    assert caplog.messages == []


def test_a_wish_after_which_nothing_comes(lab, caplog):
    model, inner, outer, _ = loop()
    with outer:
        lab.push(model, inner, 0, 0)
        lab.push(model, inner, 0, 1)
        outer.set_outer_lr(0.5)
    text = "set_outer_lr(0.5) was called, but this replica has contributed to no sync"
    assert text in caplog.text


def test_it_may_be_called_where_the_report_comes():
    """Also in the report of the last sync, where it has no effect any more."""
    rates = []

    def halve(report):
        rates.append(report.outer_lr)
        outer.set_outer_lr(report.outer_lr / 2)

    model, inner, outer, _ = loop(outer_lr=0.5, on_sync=halve)
    live(model, inner, outer, *range(5))
    assert rates == [0.5, 0.25, 0.125]


def test_a_wish_of_an_incarnation_that_has_just_come_is_not_taken_for_overruled():
    """The run's rate was changed before it came.

    Its first sync is decided without it, with that rate, and is no answer.
    """
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


class NoRate(torch.optim.Optimizer):
    """Subtracts the gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


def fails(sync):
    raise LookupError("no such sync")


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (fails, r"outer_lr\(1\) raised LookupError: no such sync"),
        (lambda: 1.0, r"outer_lr\(1\) raised TypeError"),
        (lambda sync: 0.0, "must be positive, not 0.0"),
        (lambda sync: -1, "must be positive, not -1.0"),
        *((lambda sync, value=value: value, f"must be a finite number, not {value}")
          for value in (math.nan, math.inf, None, True)),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_refused_when_the_loop_is_made(function, named):
    with pytest.raises(ConfigurationError, match=r"outer_lr\(1\)") as caught:
        loop(outer_lr=function)
    assert caught.match(named)


@pytest.mark.parametrize("kind", ["threads", "sharded"])
def test_one_that_fails_later_names_the_sync_and_nothing_is_sent(kind, lab):
    """All replicas fail, by the same error, with the values that they had."""

    def replica(exchange):
        rate = lambda sync: 0.5 if sync < 3 else "x"  # noqa: E731
        model, inner, outer, _ = loop(exchange, outer_lr=rate, sync_every=1)

        def go():
            live(model, inner, outer, *range(4))

        with pytest.raises(ConfigurationError, match=r"what outer_lr\(3\) returns"):
            go()
        return outer.committed

    assert lab.run(replica, exchanges(kind, 2)) == [2, 2]


def test_a_wish_that_cannot_be_used_is_refused_and_the_run_goes_on(lab):
    model, inner, outer, _ = loop(sync_every=1)
    with pytest.raises(SyncError, match="inside the block"):
        outer.set_outer_lr(0.5)
    with outer:
        for value in (0, -0.1, math.nan, "0.5", None, lambda sync: 1.0):
            with pytest.raises(ConfigurationError, match="the outer learning rate must be"):
                outer.set_outer_lr(value)
        lab.push(model, inner, 0, 0)
    assert outer.committed == 1
    with pytest.raises(SyncError, match="inside the block"):
        outer.set_outer_lr(0.5)


def test_where_there_is_no_rate_or_nobody_can_be_told():
    with pytest.raises(ConfigurationError, match="NoRate has no learning rate"):
        loop(outer_optimizer=NoRate, outer_lr=lambda sync: 0.5)
    for outer, message in [
        (loop(outer_optimizer=NoRate)[2], r"set_outer_lr\(\) was called.*NoRate has no"),
        (loop(*exchanges("manager", 1))[2], "ManagerExchange, by which the other"),
    ]:
        with outer, pytest.raises(ConfigurationError, match=message):
            outer.set_outer_lr(0.5)


def test_an_optimizer_that_the_caller_changes_by_hand():
    """The change would be undone by the next outer step, and in no record."""
    made = []

    def keeps(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.5))
        return made[-1]

    rate = lambda sync: 0.5 / sync  # noqa: E731
    model, inner, outer, _ = loop(outer_optimizer=keeps, outer_lr=rate, sync_every=1)
    change = lambda model: made[-1].param_groups[0].update(lr=0.9)  # noqa: E731
    with pytest.raises(ConfigurationError, match=r"outer_lr is 0\.9 for fragment 0"):
        live(model, inner, outer, 0, change, 1)
