"""A sync in two halves, in every exchange: the halves together are a sync, and nothing else may be
done between them.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sync_lab import LEARNED, START, Replica

from diloco_core import (
    ManagerExchange,
    MockManager,
    ReplicaLostError,
    SyncError,
    Timing,
    connect,
    in_process,
)

KINDS = ("in process", "fixed", "elastic", "manager")
TELLING = ("in process", "fixed", "elastic")
"""Those that can tell whether the others have contributed."""
REPLICAS = 2


def exchanges_of(kind, folder, timing=None):
    if kind in {"in process", "manager"}:
        exchanges = in_process(REPLICAS, timing=timing)
        if kind == "in process":
            return exchanges
        return [ManagerExchange(MockManager(e), rank=e.rank, world_size=2) for e in exchanges]
    options = {"min_replicas": REPLICAS} if kind == "elastic" else {}
    options |= {} if timing is None else {"timing": timing}
    return [connect(f"{folder}/run", rank=rank, world_size=2, **options) for rank in range(2)]


@pytest.fixture
def replicas(request, tmp_path):
    """Two replicas that have met, and have learned something."""
    made = at_once(Replica, exchanges_of(request.param, tmp_path))
    at_once(Replica.learn, made)
    yield made
    for replica in made:
        replica.exchange.abort(RuntimeError("the test is over"))


def at_once(act, things):
    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(act, things))


def begin(replica):
    return replica.exchange.begin(replica.job)


def finish(pending):
    return pending.finish()


def each(*kinds):
    return pytest.mark.parametrize("replicas", kinds, indirect=True)


@each(*KINDS)
def test_the_halves_together_are_a_sync(replicas):
    pending = at_once(begin, replicas)
    for replica in replicas:  # nothing is adopted before the second half
        assert torch.equal(replica.parameter, START - LEARNED[replica.exchange.rank])
    reports = at_once(finish, pending)
    for replica, report in zip(replicas, reports, strict=True):
        replica.job.finish()
        assert torch.equal(replica.parameter, START - 0.5 * (LEARNED[0] + LEARNED[1]) / 2)
        assert (report.committed, report.members, report.contribution) == (True, 2, "counted")


@pytest.mark.parametrize("kind", TELLING)
def test_the_time_of_a_sync_is_that_of_its_halves(kind, tmp_path, monkeypatch):
    """Not what comes between them: the first half takes an hour here, and that takes a day."""
    hour, day, jumps = 3600.0, 86400.0, [0.0]
    timing = Timing(
        join_timeout=1e9,
        sync_timeout=1e9,
        **({"lost_after": 1e9} if kind == "fixed" else {}),
        clock=lambda: time.monotonic() + sum(jumps),
    )
    replicas = at_once(Replica, exchanges_of(kind, tmp_path, timing))
    at_once(Replica.learn, replicas)
    slow = replicas[0].job
    contribution = slow.contributed

    def slowly(piece, out):
        if len(jumps) == 1:
            jumps.append(hour)
        return contribution(piece, out)

    monkeypatch.setattr(slow, "contributed", slowly)
    pending = [begin(replica) for replica in replicas]
    jumps.append(day)
    slow_report, report = at_once(finish, pending)
    assert hour <= slow_report.exchange_seconds + slow_report.wait_seconds < day
    assert hour <= slow_report.exchange_seconds
    assert 0 <= report.exchange_seconds + report.wait_seconds < hour
    at_once(lambda replica: replica.exchange.abort(RuntimeError("the test is over")), replicas)


@each(*KINDS)
def test_one_sync_is_under_way_at_a_time(replicas):
    pending = at_once(begin, replicas)
    for replica in replicas:
        with pytest.raises(SyncError, match="cannot be begun: the sync of 0 has been begun"):
            replica.exchange.begin(replica.job)
    at_once(finish, pending)
    for other in pending:
        with pytest.raises(SyncError, match="the sync of 0 is over: begin another one"):
            other.finish()


@pytest.mark.sampled
@each(*TELLING)
def test_nobody_leaves_with_a_sync_under_way(replicas):
    pending = at_once(begin, replicas)
    for replica in replicas:
        with pytest.raises(SyncError, match="cannot leave: the sync of 0 has been begun and not"):
            replica.exchange.leave()
    at_once(finish, pending)
    for replica in replicas:
        replica.job.finish()
    at_once(lambda replica: replica.exchange.leave(), replicas)


@each(*KINDS)
def test_a_sync_that_is_given_up_cannot_be_finished(replicas, request):
    first, second = at_once(begin, replicas)
    replicas[1].exchange.abort(RuntimeError("out of coffee"))
    with pytest.raises(SyncError, match="the sync of 0 is over"):
        second.finish()
    if request.node.callspec.params["replicas"] in {"in process", "fixed"}:
        with pytest.raises(ReplicaLostError, match="out of coffee") as caught:
            first.finish()
        assert caught.value.rank == 1
