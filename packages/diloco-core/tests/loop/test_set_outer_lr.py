"""``set_outer_lr``: a wish that travels with the next contribution, and what becomes of it."""

from dataclasses import replace

import pytest
import torch
from rates_lab import loop
from simulated import Schedule, SimulatedStore, SimulatedTraining, read_log, simulate
from torch import nn

from diloco_core import (
    DiLoCo,
    Elastic,
    in_process,
)
from diloco_core._arithmetic._rate import Proposal, Rate
from diloco_core._loop._outer_lr import OuterLr


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
            "rank 0: set_outer_lr() was called on this replica and asked for 0.25, but the run "
            "takes 0.5, which rank 1 has"
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
