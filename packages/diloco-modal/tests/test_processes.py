"""Calls that are processes in Modal's own container entrypoint, from launch to results."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from diloco_localcloud import ModalProcesses
from diloco_modal import ModalSpawnExecutor, build_app
from diloco_protocol import Backoff

PATIENCE = 600.0
pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = """
    import os, pathlib, sys, time

    def train(folder, wait=False):
        rank, attempt = os.environ["REPLICA_RANK"], int(os.environ["DILOCO_ATTEMPT"])
        print(f"rank {rank} attempt {attempt}", flush=True)
        # Fails if it is trained twice.
        with open(pathlib.Path(folder, f"{rank}-{attempt}"), "x") as mark:
            mark.write(str(os.getpid()))
        if wait and attempt == 1:
            time.sleep(600)
        return [int(rank), attempt]
"""


class Place:
    def __init__(self, stand_in, folder):
        self.stand_in, self.world, self.folder = stand_in, stand_in.world, folder
        self.client = stand_in.client()
        build_app().deploy(client=self.client)

    def executor(self):
        path = os.pathsep.join([str(self.folder), *(entry for entry in sys.path if entry)])
        return ModalSpawnExecutor(
            client=self.client,
            env={"PYTHONPATH": path},
            grace=5.0,
            backoff=Backoff(first=0.1, cap=0.5),
        )

    def launch(self, n, **kwargs):
        kwargs = {"folder": str(self.folder), **kwargs}
        return self.executor().launch_replicas(
            n, "program:train", kwargs, run_id="run", timeout=600
        )

    def await_start(self, rank, attempt=1):
        mark = self.folder / f"{rank}-{attempt}"
        limit = time.monotonic() + PATIENCE
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < limit, f"rank {rank} did not start"
            time.sleep(0.05)
        return int(mark.read_text())


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
    with ModalProcesses() as stand_in:
        made = Place(stand_in, tmp_path)
        yield made
        made.client.__exit__(None, None, None)


def test_a_run(place):
    handles = place.launch(2)
    results = place.executor().collect(handles, timeout=PATIENCE)
    assert [(each["status"], each["result"]) for each in results] == [
        ("succeeded", [0, 1]),
        ("succeeded", [1, 1]),
    ], results
    assert "rank 1 attempt 1" in place.executor().stream_logs(handles[1])


def test_a_preempted_replica_is_the_next_attempt(place):
    (handle,) = place.launch(1, wait=True)
    place.await_start(0)
    assert place.executor().poll(handle) == "running"
    place.world.call(handle.metadata["function_call_id"]).preempt()
    (result,) = place.executor().collect([handle], timeout=PATIENCE)
    assert (result["status"], result["result"], result["attempt"]) == ("succeeded", [0, 2], 2), (
        result
    )
    entries = place.world.dict("diloco-run").items()
    assert [entries[f"end-0-{life}"]["again"] for life in (1, 2)] == [True, False]


LAUNCHER = """
    import os, signal, sys
    from diloco_modal import ModalSpawnExecutor
    from diloco_modal._client._client import Client

    when, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    plain = Client.spawn

    async def spawn(self, function, payload):
        at = payload["rank"] == number
        if at and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        call = await plain(self, function, payload)
        if at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call

    Client.spawn = spawn
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    executor = ModalSpawnExecutor(env=path, grace=5.0)
    executor.launch_replicas(3, "program:train", {"folder": folder}, run_id="run", timeout=600)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launcher_that_was_killed_and_its_launch_repeated(place, when):
    script = place.folder / "launcher.py"
    script.write_text(textwrap.dedent(LAUNCHER))
    path = place.executor()._env["PYTHONPATH"]
    killed = subprocess.run(
        [sys.executable, script, when, "1", str(place.folder)],
        env={**os.environ, **place.stand_in.environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    handles = place.launch(3)
    results = place.executor().collect(handles, timeout=PATIENCE)
    assert [each["result"] for each in results] == [[0, 1], [1, 1], [2, 1]], results
    assert place.executor().attach("run") == handles


def test_a_cancelled_replica_is_gone(place):
    (handle,) = place.launch(1, wait=True)
    pid = place.await_start(0)
    executor = place.executor()
    executor.cancel(handle)
    (result,) = executor.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["reason"]) == ("cancelled", "cancel_requested"), result
    assert place.world.dict("diloco-run").get("end-0-1")["again"] is False
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
