"""Pods that are killed, evicted, deleted by force, or on a node that is lost."""

from __future__ import annotations

import pytest
from processes_lab import SLEEP, alive, pod, up
from standin_lab import PATIENCE

pytestmark = pytest.mark.processes


def test_a_killed_pod_is_replaced(clients, stand_in, run):
    run(SLEEP, backoffLimitPerIndex=1)
    up(clients, stand_in)
    first = stand_in.pods.newest("run", 0, "ns")
    first.kill()
    stand_in.pods.wait_for(lambda: len(stand_in.pods.of("run", "ns")) == 2, PATIENCE)
    second = stand_in.pods.newest("run", 0, "ns")
    assert first.json["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    assert (
        second.json["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"] == "1"
    )


def test_an_evicted_pod_is_replaced_and_not_counted(clients, stand_in, run):
    pattern = {"type": "DisruptionTarget", "status": "True"}
    run(
        SLEEP,
        backoffLimitPerIndex=0,
        podFailurePolicy={"rules": [{"action": "Ignore", "onPodConditions": [pattern]}]},
    )
    up(clients, stand_in)
    first = stand_in.pods.newest("run", 0, "ns")
    pid = first.pids[0]
    name = first.name
    eviction = {"metadata": {"name": name, "namespace": "ns"}}
    clients.core.create_namespaced_pod_eviction(name=name, namespace="ns", body=eviction)
    stand_in.pods.wait_for(lambda: stand_in.pods.newest("run", 0, "ns").name != name, PATIENCE)
    assert not alive(pid)
    notes = pod(stand_in)["metadata"]["annotations"]
    assert notes["batch.kubernetes.io/job-index-failure-count"] == "0"
    assert notes["batch.kubernetes.io/job-index-ignored-failure-count"] == "1"


def test_a_forced_delete_ends_the_processes_too(clients, stand_in, run):
    run(SLEEP, grace=600, backoffLimitPerIndex=1)
    up(clients, stand_in)
    forced = stand_in.pods.newest("run", 0, "ns")
    pid = forced.pids[0]
    clients.core.delete_namespaced_pod(name=forced.name, namespace="ns", grace_period_seconds=0)
    stand_in.pods.wait_for(lambda: forced.json is None and not forced.pids, PATIENCE)
    assert not alive(pid)


def test_the_options_of_an_eviction_are_obeyed(clients, stand_in, run):
    run(SLEEP, grace=600, backoffLimitPerIndex=1)
    up(clients, stand_in)
    held = stand_in.pods.newest("run", 0, "ns")
    where = {"name": held.name, "namespace": "ns"}
    for options, grace in (({"dryRun": ["All"]}, None), ({"gracePeriodSeconds": 599}, 599)):
        eviction = {"metadata": where, "deleteOptions": options}
        clients.core.create_namespaced_pod_eviction(**where, body=eviction)
        assert held.json["metadata"].get("deletionGracePeriodSeconds") == grace
