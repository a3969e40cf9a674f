"""``set_outer_lr``: a wish that travels with the next contribution, and what becomes of it; and
rates that cannot be used.
"""

import math
from dataclasses import replace

import pytest
import torch
from loop_lab import KINDS, exchanges, live, loop
from simulated import Schedule, SimulatedStore, SimulatedTraining, read_log, simulate

from diloco_core import ConfigurationError, Elastic, SyncError, in_process


def train(lab, exchange, wishes, steps=4, **options):
    """Ask for rates before some steps, by (rank, step); return those of the syncs."""
    model, inner, outer, reports = loop(exchange, **{"sync_every": 1, "outer_lr": 0.7, **options})
    with outer:
        for step in range(steps):
            for value in wishes.get((exchange.rank, step), ()):
                outer.set_outer_lr(value)
            lab.push(model, inner, exchange.rank, step)
    return [report.outer_lr for report in reports]


@pytest.mark.parametrize(
    ("wishes", "rates", "told"),
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
def test_who_is_heard_and_who_is_told(lab, caplog, wishes, rates, told):
    found = lab.run(lambda exchange: train(lab, exchange, wishes), in_process(2))
    assert found == [rates, rates]
    messages = [text for text in caplog.messages if "set_outer_lr() was called" in text]
    assert len(messages) == bool(told)
    assert all(part in messages[0] for part in told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wish_while_a_sync_is_under_way_is_for_the_next_one(lab, caplog, kind):
    """An earlier one that travels with that sync is heard, and the later one is not lost."""
    wishes = {(0, 0): [0.25], (0, 1): [0.5]}
    found = lab.run(
        lambda each: train(lab, each, wishes, 6, sync_every=2, delay=1), exchanges(kind, 2)
    )
    assert found == [[0.25, 0.5, 0.5]] * 2
    assert caplog.messages == []


def test_a_wish_after_which_nothing_comes(lab, caplog):
    model, inner, outer, _ = loop()
    with outer:
        lab.push(model, inner, 0, 0)
        lab.push(model, inner, 0, 1)
        outer.set_outer_lr(0.5)
    said = "set_outer_lr(0.5) was called, but this replica has contributed to no sync"
    assert said in caplog.text


def test_it_may_be_called_where_the_report_comes(lab):
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


@pytest.mark.parametrize("kind", KINDS)
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
