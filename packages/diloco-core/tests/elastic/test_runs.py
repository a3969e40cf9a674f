"""Test who is waited for, who comes and goes, and what becomes of what was learned late."""

from functools import partial
from itertools import pairwise

import pytest
from members_lab import members_in
from simulated import (
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    once,
    read_log,
    simulate,
    violations,
)

from diloco_core import Elastic, StoreUnavailableError


class TestMembership:
    @pytest.mark.sampled
    @pytest.mark.parametrize("topology", ["sharded", "gather"])
    def test_an_outage_of_the_store_counts_towards_nobodys_grace(self, topology):
        def train(node, begins):
            real = node.connection._request

            def request(*args, **options):
                if begins <= node.connection.clock() < begins + 44:
                    node.sleep(0.1)
                    raise StoreUnavailableError("injected: the store is away")
                return real(*args, **options)

            node.connection._request = request
            return training(node)

        for tenths in range(22, 60, 6):
            # Rank 2 is a second late, so that the others wait for it when the store goes away.
            pauses = {(2, step): 0.5 for step in range(12)}
            training = SimulatedTraining(syncs=5, sizes=(40,), pauses=pauses)
            settings = Elastic(2, grace=3.0, topology=topology)
            act = partial(train, begins=tenths / 10)
            outcome = simulate(act, 3, settings, sync_timeout=100.0)
            assert violations(outcome, training) == []
            assert members_in(outcome.store) == [[0, 1, 2]] * 5
            assert len(outcome.results) == 3


class TestLateContributions:
    @pytest.mark.parametrize("late", ["carry", "drop"])
    def test_they_are_carried_or_dropped(self, late, caplog):
        training = SimulatedTraining(syncs=6, sizes=(40,), pauses={(2, 3): 9.0})
        outcome = flawless(training, Schedule(3), Elastic(2, grace=5.0, late=late))
        fates = [report.contribution for report in training.reports[2, 1]]
        assert {"carry": "carried", "drop": "dropped"}[late] in fates
        assert ("are lost because of late='drop'" in caplog.text) is (late == "drop")
        log, _ = read_log(outcome.store)
        ranges = [(m.start, m.stop) for commit in log for m in commit.members if m.rank == 2]
        covered = sum(stop - start for start, stop in ranges)
        if late == "carry":
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
            assert ranges[0][0] == 0
            assert max(stop - start for start, stop in ranges) > 2
        else:
            assert covered < ranges[-1][1]
            assert {stop - start for start, stop in ranges} == {2}


@pytest.mark.sampled
@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("how", ["left", "failed"])
def test_when_a_stopped_run_is_resumed_everybody_has_a_grace_to_come(topology, how):
    settings, store = Elastic(2, grace=20.0, topology=topology), SimulatedStore()
    members = [[0, 1, 2]] * 3
    before = SimulatedTraining(syncs=3, sizes=(40,))

    def train(node):
        before(node)
        if how == "failed":
            raise RuntimeError("out of memory")

    once(train, Schedule(3), settings, store=store)
    for syncs, starts, ranks in ((6, [0.0, 9.0, 15.0], [0, 1, 2]), (9, [0.0, 9.0, 1e6], [0, 1])):
        training = SimulatedTraining(syncs=syncs, sizes=(40,), salts=dict(before.salts))
        options = {"most_incarnations": 1, "limit": 2000.0}
        outcome = simulate(training, Schedule(3, starts=starts), settings, store=store, **options)
        assert violations(outcome, training) == [] or 1e6 in starts
        members += [ranks] * 3
        assert members_in(store) == members
    # The third was waited for once.
    waits = [report.wait_seconds for report in training.reports[0, 1]]
    assert 10 < max(waits) < 30
    assert sum(wait > 5 for wait in waits) == 1


def test_rank_0_is_told_whose_initial_values_were_taken(caplog):
    """Rank 1 begins the run, alone; rank 0 comes when it is over, and once more later."""
    store, settings, salts = SimulatedStore(), Elastic(1, grace=5.0), {}
    warned = []
    for syncs, starts in ((2, [1e6, 0.0]), (4, [0.0, 1e6]), (6, [0.0, 1e6])):
        caplog.clear()
        training = SimulatedTraining(syncs=syncs, sizes=(40,), salts=salts)
        simulate(training, Schedule(2, starts=starts), settings, store=store, limit=1000.0)
        warned.append("was begun by rank 1 with the initial values of that rank" in caplog.text)
    assert members_in(store) == [[1]] * 2 + [[0]] * 4
    assert warned == [False, True, False]


def test_a_wish_stands_until_a_sync_counts_its_maker():
    """It is held up while it asks, so that syncs are decided without it."""
    training = SimulatedTraining(
        syncs=10, sizes=(40,), pauses={(0, 2): 14.0}, wishes={(0, 1, 2): 0.25}
    )
    outcome = simulate(training, Schedule(3), Elastic(2, grace=8.0))
    log, _ = read_log(outcome.store)
    left_out = [record.sync for record in log if 0 not in {m.rank for m in record.members}]
    rates = [record.rate.values[0] for record in log]
    assert violations(outcome, training) == []
    assert left_out[0] == 2
    assert left_out[-1] < len(rates)
    back = left_out[-1]
    assert rates == [0.7] * back + [0.25] * (len(rates) - back)
