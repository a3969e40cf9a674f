"""The whole launch on one machine.

The real client, a Kubernetes API over HTTPS, pods that are processes, and the demo's trainer.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import boto3
import pytest
import torch
from integration_lab import PATIENCE
from moto.server import ThreadedMotoServer
from rehearsal_lab import (
    RUN,
    elastic,
    losses_beside_undisturbed,
    processes_of,
    python_path,
    synced,
    train_on_nodes,
    wait_for,
    write_programs,
)
from warm_command import warm_command

from diloco_core import open_journal
from diloco_eks import EKSExecutor
from diloco_local import LocalProcessExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, ReplicaHandle, ReplicaState, ReplicaStatus

pytestmark = pytest.mark.processes

DEMO = Path(__file__).parents[1] / "tools" / "demo"
MARK = "DILOCO_REHEARSAL"
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path


def square(folder, seconds):
    rank = int(os.environ["REPLICA_RANK"])
    print("here is", rank, flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not Path(folder, "go").exists():
        time.sleep(0.01)
    return rank * rank


def polite(folder):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(folder, "attempt-" + os.environ["DILOCO_ATTEMPT"]).touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return int(os.environ["DILOCO_ATTEMPT"])


def mean():
    import torch
    from diloco_core import ObjectStoreAllReduce

    value = torch.tensor([float(os.environ["REPLICA_RANK"])])
    with ObjectStoreAllReduce() as reduce:
        reduce.mean([value])
    return value.tolist()
"""
LAUNCHER = """
import json, os, sys, time
from pathlib import Path
from diloco_eks import EKSExecutor

folder, variables = sys.argv[1], json.loads(sys.argv[2])
with EKSExecutor("any/image:1", kubeconfig=f"{folder}/kubeconfig", env=variables) as executor:
    handles = executor.launch_replicas(
        2, "small_trainer:square", {"folder": folder, "seconds": 6000}
    )
    text = json.dumps([handle.to_dict() for handle in handles])
    Path(folder, "partial").write_text(text)
    Path(folder, "partial").rename(f"{folder}/handles.json")
    time.sleep(600)
"""


class Rehearsal:
    """A cluster of processes, and executors that use it."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        (folder / "small_trainer.py").write_text(TRAINER)
        write_programs(folder)
        self.variables = {
            "PYTHONPATH": os.pathsep.join([str(DEMO), python_path(folder)]),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        resources = {"nvidia.com/gpu": "16"}
        self.stand_in = KubernetesProcesses(backoff_seconds=0.5, resources=resources).start()
        self.kubeconfig = self.stand_in.kubeconfig(folder / "kubeconfig")

    def executor(self, **more):
        more.setdefault("env", {})
        more["env"] = {**self.variables, **more["env"]}
        options = {**more, "grace": 2.0, "backoff": Backoff(first=0.1, factor=1.2, cap=0.5)}
        return EKSExecutor("any/image:1", kubeconfig=self.kubeconfig, **options)

    def processes(self):
        """Every process that a pod has started."""
        return processes_of(MARK, self.mark)

    def nothing_runs(self):
        wait_for(lambda: not self.processes(), "every process to be gone")


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
            "data": str(tmp_path / "data"), "save": str(tmp_path / f"{name}.pt"), "parts": None,
            "steps": steps,
            "sync_every": 10, "batch": 4, "lr": 6e-3, "outer_lr": 0.7, "seed": 0,
        }  # fmt: skip
        store = str(tmp_path / f"{name}-store")
        return {
            "trainer_module": "trainer",
            "trainer_fn": "train",
            "trainer_kwargs": kwargs,
            "rendezvous_uri": store,
        }

    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_pods_train_what_local_processes_train(rehearsal, training, tmp_path, count):
    entrypoint = "diloco_core.replica_entrypoint:run"
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            count, entrypoint, training("pods"), run_id="pods", timeout=PATIENCE
        )
        results = executor.collect(handles, timeout=PATIENCE)
        assert [result["status"] for result in results] == ["succeeded"] * count, results
        reports = [
            json.loads(line) for line in executor.log_iter(handles[-1]) if line.startswith("{")
        ]
        assert [report["total_inner_steps"] for report in reports] == [10, 20, 30]
    local = LocalProcessExecutor(root=tmp_path / "local", env=rehearsal.variables)
    again = local.collect(
        local.launch_replicas(count, entrypoint, training("local"), run_id="local"),
        timeout=PATIENCE,
    )
    assert [result["result"] for result in again] == [result["result"] for result in results]
    here, there = (torch.load(tmp_path / f"{name}.pt") for name in ("local", "pods"))
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.slow
def test_a_fixed_run_has_replicas_of_two_kinds(rehearsal, tmp_path):
    options = {"world_size": 4, "cohort": "both", "timeout": PATIENCE}
    where = {"trainer_module": "small_trainer", "trainer_fn": "mean"}
    where["rendezvous_uri"] = str(tmp_path / "store")
    entrypoint = "diloco_core.replica_entrypoint:run"
    local = LocalProcessExecutor(root=tmp_path / "local", env=rehearsal.variables)
    with rehearsal.executor() as executor:
        pods = executor.launch_replicas(2, entrypoint, where, run_id="pods", **options)
        processes = local.launch_replicas(
            2, entrypoint, where, run_id="processes", rank_offset=2, **options
        )
        try:
            results = executor.collect(pods, timeout=PATIENCE)
            results += local.collect(processes, timeout=PATIENCE)
        finally:
            local.cancel_run("processes")
    assert [(result["rank"], result["result"]) for result in results] == [
        (rank, [1.5]) for rank in range(4)
    ], results


@pytest.mark.slow
def test_a_fixed_run_is_several_launches_of_one_executor(rehearsal, tmp_path):
    where = {"trainer_module": "small_trainer", "trainer_fn": "mean"}
    where["rendezvous_uri"] = str(tmp_path / "store")
    executor = LocalProcessExecutor(root=tmp_path / "local", env=rehearsal.variables)
    handles = [
        executor.launch_replicas(
            1, "diloco_core.replica_entrypoint:run", where, run_id=f"part-{rank}",
            rank_offset=rank, world_size=2, cohort="whole", timeout=PATIENCE,
        )[0]
        for rank in range(2)
    ]  # fmt: skip
    try:
        results = executor.collect(handles, timeout=PATIENCE)
    finally:
        for handle in handles:
            executor.cancel(handle)
    assert [result["result"] for result in results] == [[0.5], [0.5]], results


@pytest.mark.slow
def test_a_lost_replica_ends_a_fixed_run_and_is_named(rehearsal, training):
    with rehearsal.executor() as executor:
        entrypoint = "diloco_core.replica_entrypoint:run"
        handles = executor.launch_replicas(
            3, entrypoint, training("fixed", steps=100_000), run_id="fixed"
        )
        wait_for(
            lambda: executor.poll(handles[1]) == "running"
            and "total_inner_steps" in executor.stream_logs(handles[1]),
            "a sync",
        )
        rehearsal.stand_in.pods.newest("fixed", 1).kill()
        results = executor.collect(handles, timeout=PATIENCE)
        assert [result["status"] for result in results] == ["failed"] * 3
        assert (results[1]["exit_code"], results[1]["signal"]) == (137, "SIGKILL")
        assert "rank 1" in results[0]["error"]
        assert "rank 1" in results[2]["error"]
        rehearsal.nothing_runs()


def test_cancel_ends_every_process_and_keeps_the_record(rehearsal, tmp_path):
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            3, "small_trainer:square", {"folder": str(tmp_path), "seconds": 6000}
        )
        wait_for(lambda: len(rehearsal.processes()) >= 6, "three runners and their children")
        executor.cancel(handles[1])
        results = executor.collect(handles, timeout=PATIENCE)
        assert {result["status"] for result in results} == {"cancelled"}
        rehearsal.nothing_runs()
        assert executor.attach(handles[0].run_id) == handles


def test_a_pod_that_leaves_with_0_when_it_is_evicted_is_started_again(rehearsal, tmp_path):
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            1, "small_trainer:polite", {"folder": str(tmp_path)}, run_id="spot"
        )
        wait_for((tmp_path / "attempt-1").exists, "the first attempt")
        rehearsal.stand_in.pods.newest("spot", 0).evict()
        wait_for((tmp_path / "attempt-2").exists, "the second attempt")
        (tmp_path / "go").touch()
        (result,) = executor.collect(handles, timeout=PATIENCE)
        assert (result["status"], result["attempt"], result["result"]) == ("succeeded", 2, 2)


def test_a_launcher_that_was_killed_finds_its_run_again(rehearsal, tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    environment = {**os.environ, "PYTHONPATH": rehearsal.variables["PYTHONPATH"]}
    launcher = subprocess.Popen(
        [sys.executable, "launcher.py", str(tmp_path), json.dumps(rehearsal.variables)],
        cwd=tmp_path,
        env=environment,
    )
    try:
        wait_for((tmp_path / "handles.json").exists, "the launch")
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    with rehearsal.executor() as executor:
        handles = [
            ReplicaHandle.from_dict(item)
            for item in json.loads((tmp_path / "handles.json").read_text())
        ]
        wait_for(
            lambda: {executor.poll(handle) for handle in handles} == {"running"},
            "the replicas to run",
        )
        (tmp_path / "go").touch()
        results = executor.collect(handles, timeout=PATIENCE)
        assert [(entry["status"], entry["result"]) for entry in results] == [
            ("succeeded", 0),
            ("succeeded", 1),
        ]
        assert executor.stream_logs(handles[1]) == "here is 1"


@pytest.fixture
def bucket():
    """An S3 bucket on this machine; the variables that lead replicas to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    options = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "region_name": "us-east-1",
    }
    boto3.client("s3", endpoint_url=endpoint, **options).create_bucket(Bucket="runs")
    yield {**keys, "AWS_ENDPOINT_URL": endpoint}
    server.stop()


@pytest.mark.slow
def test_an_elastic_run_over_s3_survives_a_kill_and_an_eviction(
    rehearsal, bucket, tmp_path, monkeypatch
):
    syncs = 16
    with rehearsal.executor(env=bucket, on_replica_failure="continue", backoff_limit=3) as executor:
        handles = executor.launch_replicas(
            4, RUN, elastic("s3://runs/one", syncs, 0.05), run_id="elastic"
        )
        wait_for(synced(executor, handles[1], 2), "two syncs")
        rehearsal.stand_in.pods.newest("elastic", 1).kill()
        wait_for(synced(executor, handles[2], 6), "six syncs")
        rehearsal.stand_in.pods.newest("elastic", 2).evict()
        results = executor.collect(handles, timeout=PATIENCE)
        assert [result["status"] for result in results] == ["succeeded"] * 4, results
        assert [result["attempt"] for result in results] == [1, 2, 2, 1]
        assert {result["result"] for result in results} == {syncs}
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    losses = losses_beside_undisturbed("s3://runs/one", syncs, tmp_path, rehearsal.variables)
    assert abs(losses[0] - losses[1]) < 0.2, losses
    assert max(losses) < 1.5, losses


def test_check_has_a_pod_try_the_bucket(rehearsal, bucket):
    with rehearsal.executor(env=bucket) as executor:
        found = {
            finding.subject: finding
            for finding in executor.check(2, rendezvous_uri="s3://runs/check")
        }
        assert all(finding.ok for finding in found.values()), found
        assert "conditional writes included" in found["rendezvous"].message
        wait_for(lambda: not executor.list_runs(), "the pods that tried to be removed")
    rehearsal.nothing_runs()


@pytest.mark.slow
def test_check_has_a_pod_try_a_bucket_that_is_not_there(rehearsal, bucket):
    with rehearsal.executor(env=bucket) as executor:
        (wrong,) = [
            one
            for one in executor.check(rendezvous_uri="s3://no-such/check")
            if one.subject == "rendezvous"
        ]
        assert wrong.ok is False
        assert "no-such" in wrong.message
        wait_for(lambda: not executor.list_runs(), "the pods that tried to be removed")
    rehearsal.nothing_runs()


@pytest.mark.slow
def test_replicas_with_eight_gpus_are_several_processes(rehearsal, tmp_path):
    with rehearsal.executor() as executor:
        requests = train_on_nodes(executor, str(tmp_path / "store"))
    assert "'nvidia.com/gpu': '8'" in requests


def test_the_journal_in_the_store_outlives_what_the_cluster_knows(rehearsal, tmp_path):
    """Also the logs, which Kubernetes removes with the pods; and it is never above the cluster."""
    uri = str(tmp_path / "run")

    def diloco(verb, *more):
        return warm_command(tmp_path, [verb, uri, *more], {"HOME": str(tmp_path / "home")})

    journal = open_journal(uri)
    with rehearsal.executor(journal=journal) as executor:
        arguments = {"folder": str(tmp_path), "seconds": 6000}
        handles = executor.launch_replicas(2, "small_trainer:square", arguments, run_id="seen")
        wait_for(
            lambda: all("here is" in executor.stream_logs(each) for each in handles),
            "both replicas to begin",
        )
        journal.record_end(handles[0], ReplicaStatus(ReplicaState.SUCCEEDED), "forged")
        assert executor.poll(handles[0]) is ReplicaState.RUNNING
        executor.cancel_run("seen")
        assert [each["status"] for each in executor.collect(handles)] == ["cancelled"] * 2
        shown, logs = diloco("status", "--json"), diloco("logs")
        assert shown.returncode == 1, shown.stderr
        recorded = json.loads(shown.stdout)["journal"]
        assert [each["state"] for each in recorded["ends"]] == ["cancelled"] * 2
        assert recorded["launches"][0]["options"]["entrypoint"] == "small_trainer:square"
        assert logs.stdout == "0 | here is 0\n1 | here is 1\n"
        executor.purge(handles[0])
        assert not executor.exists("seen")
        assert diloco("status", "--json").stdout == shown.stdout
        assert diloco("logs").stdout == logs.stdout
        facts = json.loads(diloco("report", "--json").stdout)
        assert [each["state"] for each in facts["backend"]["replicas"]] == ["cancelled"] * 2
        assert [each["status"] for each in executor.collect(handles)] == ["cancelled"] * 2
