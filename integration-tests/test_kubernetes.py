"""The whole launch on one machine: the real client, a Kubernetes API over HTTPS, pods that are processes, the demo's trainer."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from diloco_eks import EKSExecutor
from diloco_local import LocalProcessExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, ReplicaHandle

DEMO = Path(__file__).parents[1] / "tools" / "demo"
MARK = "DILOCO_REHEARSAL"
TRAINER = """
import json, os, time
from pathlib import Path


def square(folder, seconds):
    rank = int(os.environ["REPLICA_RANK"])
    print("here is", rank, flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not Path(folder, "go").exists():
        time.sleep(0.01)
    return rank * rank
"""
LAUNCHER = """
import json, os, sys, time
from pathlib import Path
from diloco_eks import EKSExecutor

folder, variables = sys.argv[1], json.loads(sys.argv[2])
with EKSExecutor("any/image:1", kubeconfig=f"{folder}/kubeconfig", env=variables) as executor:
    handles = executor.launch_replicas(2, "small_trainer:square", {"folder": folder, "seconds": 60})
    text = json.dumps([handle.to_dict() for handle in handles])
    Path(folder, "partial").write_text(text)
    Path(folder, "partial").rename(f"{folder}/handles.json")
    time.sleep(600)
"""


def wait_for(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return found


class Rehearsal:
    """A cluster of processes, and executors that use it."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        (folder / "small_trainer.py").write_text(TRAINER)
        folders = [str(DEMO), str(folder), *(entry for entry in sys.path if entry)]
        self.variables = {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", MARK: self.mark}
        self.stand_in = KubernetesProcesses().start()
        self.kubeconfig = self.stand_in.kubeconfig(folder / "kubeconfig")

    def executor(self):
        options = {"env": self.variables, "grace": 2.0, "backoff": Backoff(first=0.1, factor=1.2, cap=0.5)}
        return EKSExecutor("any/image:1", kubeconfig=self.kubeconfig, **options)

    def processes(self):
        """Every process that a pod has started, by the mark in its environment."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def nothing_runs(self):
        wait_for(lambda: not self.processes(), "every process to be gone", 20)


@pytest.fixture
def rehearsal(tmp_path):
    found = Rehearsal(tmp_path)
    yield found
    found.stand_in.stop()
    found.nothing_runs()


@pytest.fixture
def training(tmp_path):
    """Arguments for the demo's trainer: a short run on real text."""
    program = "import sys, text; from pathlib import Path; text.prepare(Path(sys.argv[1]), 4, 0)"
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    done = subprocess.run(command, cwd=DEMO, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def arguments(name, steps=30):
        kwargs = {
            "data": str(tmp_path / "data"), "save": str(tmp_path / f"{name}.pt"), "alone": False, "steps": steps,
            "sync_every": 10, "batch": 4, "lr": 6e-3, "outer_lr": 0.7, "seed": 0,
        }  # fmt: skip
        store = str(tmp_path / f"{name}-store")
        return {"trainer_module": "trainer", "trainer_fn": "train", "trainer_kwargs": kwargs, "rendezvous_uri": store}

    return arguments


def test_four_pods_train_what_four_local_processes_train(rehearsal, training, tmp_path):
    entrypoint = "diloco_core.replica_entrypoint:run"
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(4, entrypoint, training("pods"), run_id="pods", timeout=300)
        results = executor.collect(handles, timeout=240)
        assert [result["status"] for result in results] == ["succeeded"] * 4, results
        reports = [json.loads(line) for line in executor.log_iter(handles[2]) if line.startswith("{")]
        assert [report["total_inner_steps"] for report in reports] == [10, 20, 30]
    local = LocalProcessExecutor(root=tmp_path / "local", env=rehearsal.variables)
    again = local.collect(local.launch_replicas(4, entrypoint, training("local"), run_id="local"), timeout=240)
    assert [result["result"] for result in again] == [result["result"] for result in results]
    here, there = (torch.load(tmp_path / f"{name}.pt") for name in ("local", "pods"))
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_lost_replica_ends_a_strict_run_and_is_named(rehearsal, training):
    with rehearsal.executor() as executor:
        entrypoint = "diloco_core.replica_entrypoint:run"
        handles = executor.launch_replicas(3, entrypoint, training("strict", steps=100_000), run_id="strict")
        wait_for(lambda: executor.stream_logs(handles[1]) if executor.poll(handles[1]) == "running" else "", "a sync")
        rehearsal.stand_in.pods.newest("strict", 1).kill()
        results = executor.collect(handles, timeout=120)
        assert [result["status"] for result in results] == ["failed"] * 3
        assert (results[1]["exit_code"], results[1]["signal"]) == (137, "SIGKILL")
        assert "rank 1" in results[0]["error"]
        assert "rank 1" in results[2]["error"]
        rehearsal.nothing_runs()


def test_cancel_ends_every_process_and_keeps_the_record(rehearsal, tmp_path):
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(3, "small_trainer:square", {"folder": str(tmp_path), "seconds": 600})
        wait_for(lambda: len(rehearsal.processes()) >= 6, "three runners and their children")
        executor.cancel(handles[1])
        results = executor.collect(handles, timeout=60)
        assert {result["status"] for result in results} == {"cancelled"}
        rehearsal.nothing_runs()
        assert executor.attach(handles[0].run_id) == handles


def test_a_launcher_that_was_killed_finds_its_run_again(rehearsal, tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    environment = {**os.environ, "PYTHONPATH": rehearsal.variables["PYTHONPATH"]}
    launcher = subprocess.Popen(
        [sys.executable, "launcher.py", str(tmp_path), json.dumps(rehearsal.variables)], cwd=tmp_path, env=environment
    )
    try:
        wait_for((tmp_path / "handles.json").exists, "the launch")
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    with rehearsal.executor() as executor:
        handles = [ReplicaHandle.from_dict(item) for item in json.loads((tmp_path / "handles.json").read_text())]
        wait_for(lambda: {executor.poll(handle) for handle in handles} == {"running"}, "the replicas to run")
        (tmp_path / "go").touch()
        results = executor.collect(handles, timeout=60)
        assert [(entry["status"], entry["result"]) for entry in results] == [("succeeded", 0), ("succeeded", 1)]
        assert executor.stream_logs(handles[1]) == "here is 1"
