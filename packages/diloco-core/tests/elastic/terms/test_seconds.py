"""H in seconds: every replica does what it can in a window, and nobody is shut out or hangs."""

import logging
from itertools import pairwise

import pytest
import torch
from members_lab import members_in
from simulated import (
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    read_log,
    simulate,
    violations,
)

from diloco_core import DiLoCo, Elastic, Seconds
from diloco_core._run._records._keys import Delta
from diloco_core._terms._schedule import Windows


def run(paces, elastic, window=60, *, starts=(), latency=0.02, **training):
    """A simulated run in which nothing went wrong: its store and its training."""
    options = {"sizes": (4,), "sync_every": Seconds(window), "paces": paces, **training}
    trained = SimulatedTraining(**options)
    store = SimulatedStore()
    schedule = Schedule(len(paces), starts=starts, latency=latency)
    flawless(trained, schedule, elastic, store=store)
    return store, trained


def sends(store):
    """Return when each rank contributed, by sync."""
    times = {}
    for time, key, size in store.history:
        delta = Delta.parse(key)
        if delta is not None and size:
            times.setdefault(delta.sync, {})[delta.rank] = time
    return times


def steps(store):
    """Return how many inner steps each member contributed, by sync."""
    return [{m.rank: m.stop - m.start for m in record.members} for record in read_log(store)[0]]


def spread(store):
    return [max(times.values()) - min(times.values()) for times in sends(store).values()]


def test_each_replica_takes_the_steps_that_it_can_and_counts_by_them():
    store, training = run((1.0, 2.0, 4.0), Elastic(3, grace=20.0), syncs=2)
    for counted in steps(store):
        assert counted[0] == pytest.approx(60, abs=4)
        assert counted[1] == pytest.approx(30, abs=3)
        assert counted[2] == pytest.approx(15, abs=2)
    reports = training.reports[1, 1]
    assert [report.inner_steps for report in reports] == [each[1] for each in steps(store)]
    for report, counted in zip(reports, steps(store), strict=True):
        total = sum(counted.values())
        assert report.weights == pytest.approx([counted[rank] / total for rank in range(3)])


@pytest.mark.parametrize(("sizes", "delay", "alpha"), [((4,), 0, 0.0), ((4, 3), 2, 0.5)])
def test_the_windows_of_fast_and_slow_replicas_stay_together(sizes, delay, alpha):
    """Steps take 0.6 to 3.7 s: a replica is late by the rest of a step, which does not add up."""
    elastic = Elastic(3, grace=30.0)
    store, _ = run(
        (0.6, 1.3, 3.7), elastic, 60, syncs=4, sizes=sizes, delay=delay, alpha=alpha, latency=0.1
    )
    apart = spread(store)[:4]
    assert max(apart) < 3.7 * 1.1 + 1.0
    assert sum(apart) / len(apart) < 3.0
    together = [max(times.values()) for times in sends(store).values()][:4]
    gaps = [after - before for before, after in pairwise(together)]
    assert max(gaps) < 60 / len(sizes) + 2 * 3.7 * 1.1 + 2.0


def test_a_joiner_comes_into_step_at_the_next_record():
    """Without looking for it, its window would end too late for every sync."""
    store, training = run(
        (2.0, 2.0, 2.0), Elastic(1, grace=10.0), 100, starts=(0.0, 0.0, 40.0), syncs=4
    )
    assert members_in(store) == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    fates = [report.contribution for report in training.reports[2, 1]]
    assert fates == ["carried", "counted", "counted", "counted"]
    first = steps(store)[1][2]
    assert first > 55, "it counts what it had learned before, too"
    assert max(spread(store)[1:2]) < 100 / 20 + 2.2 + 1.0
    assert max(spread(store)[2:]) < 3.0


@pytest.mark.sampled
@pytest.mark.parametrize(("delay", "retention"), [(0, 20), (2, 20), (0, 1)])
def test_a_replica_that_sleeps_for_ten_windows_wakes_and_goes_on(delay, retention):
    elastic = Elastic(2, grace=5.0, topology="sharded", retention=retention)
    store, training = run(
        (2.0, 2.0, 2.0), elastic, 20, syncs=15, pauses={(1, 15): 210.0}, delay=delay
    )
    members = members_in(store)
    missed = [number for number, ranks in enumerate(members) if 1 not in ranks]
    assert 8 <= len(missed) <= 11
    assert members[-1] == [0, 1, 2]
    woken, last = (steps(store)[missed[-1] + number][1] for number in (1, 3))
    reports = training.reports[1, 1]
    if retention == 20:
        assert woken > last + 3, "what it had learned before it slept is carried"
        assert {report.contribution for report in reports} == {"counted", "carried"}
    assert any(report.reloaded for report in reports) == (retention == 1)
    waited = [report.wait_seconds for report in training.reports[0, 1]]
    assert sum(seconds > 4.5 for seconds in waited) <= 2, "the others wait for it once or twice"


def test_a_step_much_longer_than_the_window(caplog):
    """It contributes nothing without a step, or to a decided sync, and loses nothing it learned."""
    caplog.set_level(logging.WARNING)
    store, training = run((1.0, 1.0, 90.0), Elastic(1, grace=5.0), 20, syncs=8)
    assert all(ranks == [0, 1] for ranks in members_in(store)[:8])
    assert all(0 not in counted.values() for counted in steps(store))
    waits = [report.wait_seconds for report in training.reports[0, 1]]
    assert max(waits) < 8.0
    (warning,) = [text for text in caplog.messages if "A replica that is always later" in text]
    assert warning.startswith("rank 2: a sync, together with the steps of the delay")
    assert "contribute every 20 s" in warning
    assert training.reports[2, 1][0].contribution == "carried"


@pytest.mark.parametrize("killed", [False, True])
def test_a_contribution_before_its_time_shuts_nobody_out(killed):
    """The others are waited for until they had their time, and then a grace."""

    def train(node):
        model = torch.nn.ParameterList([torch.zeros(4)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        connection = node.connection
        with DiLoCo(model, inner, node.exchange, sync_every=Seconds(60)) as outer:
            early = (node.rank, node.incarnation) == (0, 1)
            while outer.committed < 3 and not (early and outer.inner_steps == 10):
                node.sleep(2.0)
                model[0].grad = torch.ones(4)
                inner.step()
            if early and killed:
                dies = connection._scheduler.now + 5.0
                connection._scheduler.call_at(dies, lambda: setattr(connection, "killed", True))
            began = connection.clock()
        return connection.clock() - began

    store = SimulatedStore()
    schedule = Schedule(2, latency=0.01, restart_after=1.0)
    outcome = simulate(train, schedule, Elastic(1, grace=5.0), store=store)
    assert outcome.errors() == {}
    assert steps(store)[0] == {0: 10, 1: 30}
    assert members_in(store)[1:] == [[0, 1] if killed else [1]] * 2
    assert killed or 38.0 < outcome.results[0, 1] < 46.0


@pytest.mark.parametrize(
    ("seconds", "violation"), [(-2, "could have been sent a step before"), (2, "s early")]
)
def test_a_contribution_that_is_not_sent_in_time_is_noticed(seconds, violation, monkeypatch):
    due = Windows.due
    monkeypatch.setattr(
        Windows, "due", lambda self, elapsed, **more: due(self, elapsed + seconds, **more)
    )
    training = SimulatedTraining(3, (4,), Seconds(20), paces=(1.0, 3.0), delay=2)
    outcome = simulate(training, 2, Elastic(2, grace=9.0))
    assert any(violation in what for what in violations(outcome, training))


@pytest.mark.parametrize(
    ("skipped", "sent"),
    [((), [(20, 20), (40, 20)]), ((19, 20), [(22, 22), (42, 20)]), (range(50), [(40, 40)])],
    ids=["never", "where the window ends", "always"],
)
def test_an_optimizer_that_skips_steps_is_waited_for(skipped, sent, caplog):
    """A sync comes with the next whole step of both optimizers, or after twice the window."""
    contributed = []

    def train(node):
        model = torch.nn.ParameterList([torch.zeros(4), torch.zeros(4)])
        both = [torch.optim.SGD([tensor], lr=1.0) for tensor in model]

        def on_sync(report):
            contributed.append((round(node.connection.clock()), report.inner_steps))

        with DiLoCo(
            model, both, node.exchange, sync_every=Seconds(20), on_sync=on_sync, flush="none"
        ):
            for step in range(50):
                node.sleep(1.0)
                for tensor, optimizer in zip(model, both, strict=True):
                    tensor.grad = torch.ones(4)
                    if optimizer is both[0] or step not in skipped:
                        optimizer.step()

    outcome = simulate(train, Schedule(1, latency=0.0001), Elastic(1, grace=5.0))
    assert outcome.errors() == {}
    assert contributed == sent
    assert ("a sync was due after 20 s and comes after 40 s" in caplog.text) == (len(skipped) > 2)
