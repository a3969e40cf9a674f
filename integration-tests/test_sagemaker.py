"""The whole launch on one machine: a real AWS client, training jobs that are processes, and S3."""

import json
import os
import signal
import subprocess
import sys
import uuid

import boto3
import pytest
from integration_lab import PATIENCE
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

from diloco_localcloud import SageMakerProcesses
from diloco_protocol import Backoff
from diloco_sagemaker import SageMakerExecutor

pytestmark = pytest.mark.processes

MARK = "DILOCO_REHEARSAL"
LAUNCHER = """
import json
import sys

from diloco_sagemaker import SageMakerExecutor

options, folder, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
executor = SageMakerExecutor(**options)
executor.launch_replicas(count, "jobs_waiter:waits", {"folder": folder}, run_id="killed")
"""


class Rehearsal:
    """An account whose jobs are processes, and executors that use it."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        write_programs(folder)
        self.variables = {
            "PYTHONPATH": python_path(folder),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        self.stand_in = SageMakerProcesses(kill_seconds=10.0).start()
        self.world = self.stand_in.world
        for name, value in self.stand_in.environment.items():
            monkeypatch.setenv(name, value)
        client = boto3.Session().client("s3")
        client.create_bucket(Bucket="runs")
        client.close()
        self.options = {
            "role_arn": "arn:aws:iam::123456789012:role/trainer",
            "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
            "output_s3_path": "s3://runs/output",
            "command": [sys.executable, "-m", "diloco_protocol.runner"],
            "env": self.variables,
            "grace": 2.0,
        }

    def executor(self):
        return SageMakerExecutor(**self.options, backoff=Backoff(first=0.1, factor=1.2, cap=0.5))

    def processes(self):
        """Every process that a job has started, by the mark in its environment."""
        return processes_of(MARK, self.mark)


@pytest.fixture
def rehearsal(tmp_path, monkeypatch):
    found = Rehearsal(tmp_path, monkeypatch)
    yield found
    found.stand_in.stop()
    wait_for(lambda: not found.processes(), "every process to be gone")


def test_a_run_that_is_cancelled_half_way_leaves_nothing_running(rehearsal, tmp_path):
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            3, "jobs_waiter:waits", {"folder": str(tmp_path)}, run_id="cancelled"
        )
        for rank in range(3):
            wait_for((tmp_path / f"up-{rank}").exists, "a program to run")
        executor.cancel_run("cancelled")
        results = executor.collect(handles, timeout=PATIENCE)
        assert [result["status"] for result in results] == ["cancelled"] * 3
        assert [job.status[0] for job in rehearsal.world.jobs()] == ["Stopped"] * 3
        wait_for(lambda: not rehearsal.processes(), "every process to be gone")


@pytest.mark.parametrize("created", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_launcher_that_is_killed_while_it_creates_jobs(rehearsal, tmp_path, created):
    """Whoever launches the same run again has each job once."""
    # Each answer comes late, so that the launcher can be killed between a job and the next.
    rehearsal.stand_in.faults.add(
        "delay", verb="CreateTrainingJob", resource="sagemaker", times=None, seconds=1.0
    )
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    options = {**rehearsal.options, "endpoint_url": rehearsal.stand_in.url}
    launcher = subprocess.Popen(
        [sys.executable, "launcher.py", json.dumps(options), str(tmp_path), "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": rehearsal.variables["PYTHONPATH"]},
    )
    try:
        wait_for(lambda: len(rehearsal.world.jobs()) >= created, "the jobs to be created")
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    rehearsal.stand_in.faults.clear()
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            3, "jobs_waiter:waits", {"folder": str(tmp_path)}, run_id="killed"
        )
        names = [handle.metadata["job_name"] for handle in handles]
        assert sorted(job.name for job in rehearsal.world.jobs()) == sorted(names)
        assert len(names) == 3
        (tmp_path / "go").touch()
        results = executor.collect(handles, timeout=PATIENCE)
        assert [(result["status"], result["result"]) for result in results] == [
            ("succeeded", rank) for rank in range(3)
        ]


@pytest.mark.slow
def test_an_elastic_run_on_spot_over_s3_survives_an_interruption(rehearsal, tmp_path):
    syncs = 12

    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            4, RUN, elastic("s3://runs/one", syncs, 0.05), run_id="elastic", spot=True
        )
        wait_for(synced(executor, handles[1], 3), "three syncs")
        rehearsal.world.job(handles[1].metadata["job_name"]).interrupt()
        results = executor.collect(handles, timeout=PATIENCE)
        assert [result["status"] for result in results] == ["succeeded"] * 4, results
        assert [result["attempt"] for result in results] == [1, 2, 1, 1]
        assert {result["result"] for result in results} == {syncs}
    losses = losses_beside_undisturbed("s3://runs/one", syncs, tmp_path, rehearsal.variables)
    assert abs(losses[0] - losses[1]) < 0.2, losses


@pytest.mark.slow
def test_replicas_with_eight_gpus_are_several_processes(rehearsal):
    with rehearsal.executor() as executor:
        requests = train_on_nodes(executor, "s3://runs/nodes")
    assert "'InstanceType': 'ml.p5.48xlarge'" in requests
