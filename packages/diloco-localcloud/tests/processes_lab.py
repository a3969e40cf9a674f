"""Waiting for what pods that really run do."""

from __future__ import annotations

import os
import time

import pytest
from standin_lab import PATIENCE

from diloco_localcloud._kubernetes._pods import _facts

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)"


def pod(stand_in, index=0):
    return stand_in.pods.newest("run", index, "ns").json


def ended(stand_in, index=0):
    """Wait for the end of an index; its terminated state."""

    def over():
        found = [each.json for each in stand_in.pods.of("run", "ns") if each.index == index]
        return bool(found) and found[-1] is not None and _facts.ended(found[-1])

    stand_in.pods.wait_for(over, PATIENCE)
    return pod(stand_in, index)["status"]["containerStatuses"][0]["state"]["terminated"]


def finished(stand_in):
    """Wait for the end of the Job; its status."""

    def over():
        conditions = stand_in.pods.job("run", "ns")["status"].get("conditions", [])
        return any(entry["type"] in ("Complete", "Failed") for entry in conditions)

    stand_in.pods.wait_for(over, PATIENCE)
    return stand_in.pods.job("run", "ns")["status"]


def up(clients, stand_in, n=1):
    """Wait until all pods have printed their first line, and their processes are known."""

    def seen():
        found = stand_in.pods.of("run", "ns")
        kubelet = stand_in._kubelet
        return len(found) == n and all(
            each.json and each.pids and kubelet.log_of(each.json, "main").times() for each in found
        )

    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:  # a log grows without a word to the cluster
        with stand_in._cluster.changed:
            if seen():
                return
            stand_in._cluster.changed.wait(0.05)
    pytest.fail("the pods did not come up")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
