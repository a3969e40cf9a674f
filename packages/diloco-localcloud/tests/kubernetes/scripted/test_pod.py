"""Pods in the hands of a test."""

from __future__ import annotations

import pytest


def test_what_a_pod_can_do(clients):
    world = clients.world
    clients.running(clients.indexed("run", 4, backoffLimitPerIndex=0))
    world.pod("run", 0, "ns").oom()
    world.pod("run", 1, "ns").fail(1)
    world.pod("run", 2, "ns").start_error()
    world.pod("run", 3, "ns").fail(9, "no data", signal=9)
    world.settle()
    ends = {pod.index: pod.json["status"] for pod in world.pods("run", "ns")}
    states = {
        index: status["containerStatuses"][0]["state"]["terminated"]
        for index, status in ends.items()
    }
    assert (states[0]["reason"], states[0]["exitCode"]) == ("OOMKilled", 137)
    assert (states[2]["reason"], states[2]["exitCode"]) == ("StartError", 128)
    assert (states[3]["message"], states[3]["signal"]) == ("no data", 9)
    assert clients.job("run")["status"]["failedIndexes"] == "0-3"
    with pytest.raises(ValueError, match="has ended already"):
        world.pod("run", 3, "ns").succeed()
    assert not world.pod("run", 3, "ns").alive
    with pytest.raises(LookupError, match="no pod of index 9"):
        world.pod("run", 9, "ns")


def test_pods_start_by_themselves_if_asked(clients):
    clients.world.auto_start = 0.9
    clients.create(clients.indexed("run", 2))
    clients.world.settle()
    assert clients.job("run")["status"]["ready"] == 2
