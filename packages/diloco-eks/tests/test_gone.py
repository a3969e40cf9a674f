"""Runs that are removed: by a purge, by their TTL, by somebody."""

import pytest

from diloco_eks._client._cluster import Cluster
from diloco_protocol import (
    InvalidRequestError,
    ReplicaNotFoundError,
)


def test_purge_waits_for_the_end_and_takes_all(bench):
    run = bench.launch(2)
    with pytest.raises(InvalidRequestError, match="2 replicas of run 'run-1' have not ended"):
        run.executor.purge(run.handles[0])
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    run.executor.purge(run.handles[0])
    run.executor.purge(run.handles[1])
    bench.world.settle()
    assert bench.world.pods("run-1") == []
    with pytest.raises(ReplicaNotFoundError, match="purged, deleted, or its TTL"):
        run.executor.poll(run.handles[0])
    run.executor.purge(run.handles[0])


def test_purge_of_a_job_that_goes_meanwhile(bench, monkeypatch):
    """Such as by another purge, or after one whose answer was lost."""
    run = bench.launch(2)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    read, reads = Cluster.read_job, []

    def goes(cluster, namespace, name):
        reads.append(name)
        if len(reads) == 2:
            bench.executor().purge(run.handles[0])
            bench.world.settle()
        return read(cluster, namespace, name)

    monkeypatch.setattr(Cluster, "read_job", goes)
    run.executor.purge(run.handles[0])
    assert len(reads) > 2
    assert bench.world.pods("run-1") == []


def test_purge_spares_a_later_run_of_the_same_name(bench):
    run = bench.launch(1)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    run.executor.purge(run.handles[0])
    bench.world.settle()
    again = bench.launch(1)
    run.executor.purge(run.handles[0])
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert again.states() == ["running"]
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])


def test_a_run_whose_ttl_is_over_is_not_found_and_not_cancelled(bench, report):
    """A missing Job says nothing about how the run ended."""
    run = bench.launch(1, executor=bench.executor(ttl_seconds_after_finished=60))
    run.pod(0).succeed(report()[0])
    bench.world.settle(within=70)
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])
    (result,) = run.executor.collect(run.handles, timeout=1)
    assert (result["status"], result["reason"]) == ("failed", "lost")


def test_who_saw_the_end_still_knows_it_when_the_job_is_gone(bench, report):
    run = bench.launch(3, executor=bench.executor(on_replica_failure="continue"))
    run.pod(0).succeed(report({"loss": 1})[0])
    run.pod(1).fail(3)
    bench.world.settle()
    assert run.states() == ["succeeded", "failed", "running"]
    run.executor._cluster.delete_job("default", run.name, run.handles[0].metadata["job_uid"])
    bench.world.settle(within=20)
    assert [run.describe(rank).state for rank in (0, 1)] == ["succeeded", "failed"]
    results = run.executor.collect(run.handles, timeout=5)
    assert [(r["status"], r["result"]) for r in results] == [
        ("succeeded", {"loss": 1}),
        ("failed", None),
        ("failed", None),
    ]
    assert [r["reason"] for r in results] == ["completed", "error", "lost"]
    with pytest.raises(ReplicaNotFoundError):
        run.describe(2)
    with pytest.raises(ReplicaNotFoundError):
        bench.executor().poll(run.handles[0])
