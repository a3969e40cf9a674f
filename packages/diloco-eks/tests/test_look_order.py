"""Looks of several threads: what is told is in order, in whichever order the answers come."""

import pytest

from diloco_eks._client._cluster import Cluster


@pytest.fixture
def between(monkeypatch):
    """Has something done between a list of pods and what is made of it, once."""

    def between(act):
        list_pods = Cluster.list_pods

        def slow(cluster, *arguments, **options):
            pods = list_pods(cluster, *arguments, **options)
            monkeypatch.setattr(Cluster, "list_pods", list_pods)
            act()
            return pods

        monkeypatch.setattr(Cluster, "list_pods", slow)

    return between


def test_a_replica_that_was_seen_to_run_does_not_wait_again(bench, between):
    run = bench.launch(1, start=False)

    def newer():
        run.pod(0).start()
        assert run.states() == ["running"]

    between(newer)
    assert run.states() == ["running"]
    assert run.describe().attempt == 1


def test_no_attempt_is_counted_twice(bench, between):
    run = bench.launch(1)
    run.pod(0).evict()
    bench.world.settle(within=30)

    def newer():
        run.pod(0).start()
        assert run.describe().attempt == 2

    between(newer)
    assert run.describe().attempt == 2
    assert (run.states(), run.describe().attempt) == (["running"], 2)
