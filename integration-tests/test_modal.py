"""The whole launch on one machine: Modal's own client and container entrypoint, replicas, S3."""

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

from diloco_localcloud import ModalProcesses, SageMakerStandIn
from diloco_modal import ModalSpawnExecutor
from diloco_protocol import Backoff

pytestmark = [pytest.mark.processes]

MARK = "DILOCO_REHEARSAL"
APP = """
import modal
from diloco_modal import build_app

app = build_app("trainer", secrets=[modal.Secret.from_name("bucket")])
"""
LAUNCHER = """
import json
import os
import signal
import sys
import threading

from diloco_modal import ModalSpawnExecutor
from diloco_modal._client import _client, _event_loop

when, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
options = json.loads(sys.argv[4])
spawn, hold = _client.Client.spawn, _client.Client.hold
# So that the ranks before this one have their calls, and those after it have none.
_event_loop.AT_ONCE = 1


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


async def spawning(self, function, payload):
    if payload["rank"] == number and when == "before":
        dies()
    call = await spawn(self, function, payload)
    if payload["rank"] == number and when == "in":
        threading.Event().wait()  # the answer never arrives; who watches Modal kills this process
    return call


async def holding(self, record, key, value):
    held = await hold(self, record, key, value)
    if key == f"call-{number}":
        dies()
    return held


_client.Client.spawn, _client.Client.hold = spawning, holding
executor = ModalSpawnExecutor(**options)
executor.launch_replicas(3, "jobs_waiter:waits", {"folder": folder}, run_id="killed")
"""
ELSEWHERE = """
import json
import sys

from diloco_modal import ModalSpawnExecutor

with ModalSpawnExecutor(app="trainer") as executor:
    print(json.dumps(executor.collect(executor.attach(sys.argv[1]))))
"""


class Rehearsal:
    """A workspace of Modal whose containers are processes, a bucket, and executors."""

    def __init__(self, folder, monkeypatch, modal, s3):
        self.folder, self.modal, self.world = folder, modal, modal.world
        write_programs(folder)
        self.environment = {**modal.environment, "PYTHONPATH": python_path(folder)}
        for name, value in (self.environment | s3.environment).items():
            monkeypatch.setenv(name, value)
        boto = boto3.Session().client("s3")
        boto.create_bucket(Bucket="runs")
        boto.close()
        self.world.add_secret("bucket", s3.environment)
        (folder / "app.py").write_text(APP)
        subprocess.run([sys.executable, "-m", "modal", "deploy", "app.py"], cwd=folder, check=True)
        self.client = modal.client()
        self.variables = {"PYTHONPATH": python_path(folder), "OMP_NUM_THREADS": "1"}
        self.options = {"app": "trainer", "env": self.variables, "grace": 2.0}

    def executor(self):
        backoff = Backoff(first=0.1, factor=1.2, cap=0.5)
        return ModalSpawnExecutor(**self.options, client=self.client, backoff=backoff)

    def python(self, text, *arguments, **options):
        """A process that knows this Modal by its environment only."""
        script = self.folder / f"{uuid.uuid4().hex}.py"
        script.write_text(text)
        words = [sys.executable, str(script), *arguments]
        return subprocess.Popen(words, cwd=self.folder, text=True, **options)


@pytest.fixture
def rehearsal(tmp_path, monkeypatch):
    mark = uuid.uuid4().hex
    image = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path(tmp_path), MARK: mark}
    with SageMakerStandIn() as s3, ModalProcesses(env=image, grace_seconds=15.0) as modal:
        made = Rehearsal(tmp_path, monkeypatch, modal, s3)
        yield made
        made.client.__exit__(None, None, None)  # older clients have no close
    wait_for(lambda: not processes_of(MARK, mark), "every process to be gone")


MOMENTS = [(when, rank) for rank in range(3) for when in ("before", "in", "after")]


@pytest.mark.parametrize(
    ("when", "rank"),
    [
        pytest.param(*moment, marks=[] if moment == ("in", 1) else pytest.mark.slow)
        for moment in MOMENTS
    ],
)
def test_a_launcher_that_is_killed_while_it_starts_calls(rehearsal, tmp_path, when, rank):
    """A second launch of the same run trains each rank once; no program is started twice."""
    options = json.dumps(rehearsal.options)
    launcher = rehearsal.python(LAUNCHER, when, str(rank), str(tmp_path), options)
    try:
        if when == "in":
            wait_for(lambda: len(rehearsal.world.calls()) > rank, "the calls to be made")
            launcher.kill()
        assert launcher.wait(PATIENCE) == -signal.SIGKILL
    finally:
        launcher.kill()
        launcher.wait()
    with rehearsal.executor() as executor:
        handles = executor.launch_replicas(
            3, "jobs_waiter:waits", {"folder": str(tmp_path)}, run_id="killed"
        )
        (tmp_path / "go").touch()
        results = executor.collect(handles, timeout=PATIENCE)
        found = [(each["status"], each["result"], each["attempt"]) for each in results]
        assert found == [("succeeded", rank, 1) for rank in range(3)], results
        assert executor.attach("killed") == handles


@pytest.mark.slow
def test_an_elastic_run_over_s3_that_is_preempted_and_partly_cancelled(rehearsal, tmp_path):
    syncs = 12
    with rehearsal.executor() as executor:
        findings = executor.check(4, rendezvous_uri="s3://runs/check", patience=PATIENCE)
        subjects = ("token", "app", "version", "rendezvous")
        assert {finding.subject: finding.ok for finding in findings} == dict.fromkeys(
            subjects, True
        )
        assert findings[-1].message.endswith("conditional writes included")
        handles = executor.launch_replicas(
            4, RUN, elastic("s3://runs/one", syncs, 0.05), run_id="elastic"
        )
        wait_for(synced(executor, handles[1], 3), "three syncs")
        rehearsal.world.call(handles[1].metadata["function_call_id"]).preempt()
        executor.cancel(handles[3])
        results = executor.collect(handles, timeout=PATIENCE)
    statuses = [result["status"] for result in results]
    assert statuses == ["succeeded", "succeeded", "succeeded", "cancelled"], results
    assert [result["attempt"] for result in results] == [1, 2, 1, 1]
    assert [result["result"] for result in results] == [syncs] * 3 + [None]
    elsewhere = rehearsal.python(ELSEWHERE, "elastic", stdout=subprocess.PIPE)
    assert json.loads(elsewhere.communicate(timeout=PATIENCE)[0]) == json.loads(json.dumps(results))
    losses = losses_beside_undisturbed("s3://runs/one", syncs, tmp_path, rehearsal.variables)
    assert abs(losses[0] - losses[1]) < 0.2, losses


@pytest.mark.slow
def test_replicas_with_eight_gpus_are_several_processes(rehearsal):
    with rehearsal.executor() as executor:
        requests = train_on_nodes(executor, "s3://runs/nodes")
    assert "'gpu': 'H100:8'" in requests
