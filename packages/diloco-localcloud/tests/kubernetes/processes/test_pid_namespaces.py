"""Containers whose first process is PID 1, as on a cluster."""

from __future__ import annotations

import os
import sys
import time

import pytest
from standin_lab import PATIENCE

from diloco_localcloud import KubernetesProcesses, StandInError
from diloco_localcloud._kubernetes._objects._resources import PODS
from diloco_localcloud._kubernetes._pods import _facts
from diloco_localcloud._kubernetes._processes import _pid_namespaces

try:
    _pid_namespaces.wrapper()
    WHY_NOT = ""
except StandInError as wrong:
    WHY_NOT = str(wrong)

needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they are here")


@pytest.fixture
def stand_in():
    path = os.pathsep.join(filter(None, sys.path))
    with KubernetesProcesses(
        namespace="ns", pid_namespaces=True, env={"PATH": os.environ["PATH"], "PYTHONPATH": path}
    ) as running:
        yield running


def start(clients, command, **more):
    container = {"name": "main", "image": "any", "command": [sys.executable, *command], **more}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "containers": [container],
    }
    clients.core.create_namespaced_pod(
        namespace="ns", body={"metadata": {"name": "one"}, "spec": spec}
    )


def wait_for_log(clients, text):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        pod = clients.pods()[0]
        if _facts.phase(pod) != "Pending" and text in clients.log("one"):
            return
        time.sleep(0.02)
    pytest.fail("the container does not come up")


def end(clients, stand_in, grace):
    """Delete the pod, kept by a finalizer so that its end can be read; seconds, and its state."""
    clients.core.patch_namespaced_pod(
        name="one", namespace="ns", body={"metadata": {"finalizers": ["tests/hold"]}}
    )
    begun = time.monotonic()
    clients.core.delete_namespaced_pod(name="one", namespace="ns", grace_period_seconds=grace)
    cluster = stand_in._cluster

    stand_in.pods.wait_for(lambda: _facts.ended(cluster.store.list(PODS, "ns")[0]), PATIENCE)
    return time.monotonic() - begun, clients.pods()[0]["status"]["containerStatuses"][0]["state"][
        "terminated"
    ]


@needs_namespaces
def test_pid_1_without_a_handler_ignores_sigterm(clients, stand_in):
    start(
        clients, ["-c", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"]
    )
    wait_for_log(clients, b"pid 1\n")
    seconds, state = end(clients, stand_in, grace=1)
    assert seconds >= 1
    assert state["exitCode"] == 137


@needs_namespaces
def test_the_runner_as_pid_1_heeds_sigterm_at_once(clients, stand_in, tmp_path):
    protocol = pytest.importorskip("diloco_protocol")
    (tmp_path / "sleeper.py").write_text(
        "import time\n\ndef sleep():\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    (tmp_path / "spec.json").write_text(protocol.ReplicaSpec("sleeper:sleep", {}, 0, 1).to_json())
    command = [
        "-m",
        "diloco_protocol.runner",
        "--spec",
        str(tmp_path / "spec.json"),
        "--outcome",
        "/dev/termination-log",
    ]
    start(clients, command, env=[{"name": "PYTHONPATH", "value": f"{tmp_path}:$(PYTHONPATH)"}])
    wait_for_log(clients, b"up\n")
    _, state = end(clients, stand_in, grace=6000)  # which nobody would wait for
    assert state["exitCode"] == 143
    outcome = protocol.Outcome.from_json(state["message"])
    assert (outcome.exit_code, outcome.signal) == (143, "SIGTERM")


@needs_namespaces
def test_what_cannot_be_started_is_told_all_the_same(clients, stand_in):
    spec = {
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "any", "command": ["/no/such/program"]}],
    }
    clients.core.create_namespaced_pod(
        namespace="ns", body={"metadata": {"name": "one"}, "spec": spec}
    )
    stand_in.pods.wait_for(
        lambda: _facts.ended(stand_in._cluster.store.list(PODS, "ns")[0]), PATIENCE
    )
    assert (
        clients.pods()[0]["status"]["containerStatuses"][0]["state"]["terminated"]["reason"]
        == "StartError"
    )


def test_a_machine_without_unshare(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    _pid_namespaces.wrapper.cache_clear()
    with pytest.raises(StandInError, match="PID namespaces need the command unshare"):
        KubernetesProcesses(pid_namespaces=True)
    _pid_namespaces.wrapper.cache_clear()
