"""Training jobs that really run on a stand-in in real time: executor, runner and program too."""

import os
import sys
import time

import boto3
import pytest

from diloco_localcloud import SageMakerProcesses
from diloco_protocol import Backoff, Reason, ReplicaState
from diloco_sagemaker import SageMakerExecutor

pytestmark = pytest.mark.processes

#: Seconds after which a test that waits for something real fails instead of hanging.
PATIENCE = 600.0

TRAINER = """
import os
import pathlib
import sys
import time

RANK = int(os.environ["REPLICA_RANK"])


def works(words):
    print(f"rank {RANK} says {words}", flush=True)
    return {"rank": RANK, "long": len(os.environ["LONG"])}


def fails():
    raise ValueError(f"rank {RANK} has no data")


def large(size):
    return "x" * (size - 2)


def waits(folder):
    pathlib.Path(folder, f"up-{RANK}-{os.environ['DILOCO_ATTEMPT']}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)


def checkpoints(folder):
    mark = pathlib.Path("/opt/ml/checkpoints".replace("/opt/ml", os.environ["ML"]), "step")
    if os.environ["DILOCO_ATTEMPT"] == "1":
        mark.write_text("42")
        waits(folder)
    return [int(os.environ["DILOCO_ATTEMPT"]), mark.read_text()]


def fails_once():
    if os.environ["DILOCO_ATTEMPT"] == "1":
        raise ValueError("once")
    return int(os.environ["DILOCO_ATTEMPT"])
"""


class Bench:
    """An account whose jobs are processes of this machine."""

    def __init__(self, stand_in, folder):
        self.stand_in, self.world, self.folder = stand_in, stand_in.world, folder
        (folder / "a_trainer.py").write_text(TRAINER)
        s3 = boto3.client("s3", **stand_in.client_options)
        s3.create_bucket(Bucket="bucket")
        s3.close()
        known = stand_in.client_options
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self.executor = SageMakerExecutor(
            role_arn="arn:aws:iam::123456789012:role/trainer",
            image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
            output_s3_path="s3://bucket/runs",
            endpoint_url=stand_in.url,
            session=boto3.Session(
                known["aws_access_key_id"],
                known["aws_secret_access_key"],
                region_name=known["region_name"],
            ),
            backoff=Backoff(first=0.05, factor=1.5, cap=0.5),
            command=[sys.executable, "-m", "diloco_protocol.runner"],
            env={"PYTHONPATH": path, "ML": "/opt/ml"},
            grace=1.0,
        )

    def launch(self, function, n=1, args=None, **options):
        return self.executor.launch_replicas(n, f"a_trainer:{function}", args, **options)

    def wait(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.02)

    def up(self, rank, attempt=1):
        """Wait until a program runs; its pid."""
        mark = self.folder / f"up-{rank}-{attempt}"
        self.wait(lambda: mark.exists() and mark.read_text())
        return int(mark.read_text())


@pytest.fixture
def bench(tmp_path):
    with SageMakerProcesses(kill_seconds=10.0) as stand_in:
        made = Bench(stand_in, tmp_path)
        yield made
        made.executor.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_from_a_launch_to_results_logs_and_a_purge(bench):
    handles = bench.launch("works", 2, {"words": "hello"}, env={"LONG": "x" * 3000})
    results = bench.executor.collect(handles, timeout=PATIENCE)
    assert [each["result"] for each in results] == [
        {"rank": 0, "long": 3000},
        {"rank": 1, "long": 3000},
    ]
    assert bench.executor.stream_logs(handles[1]).splitlines() == ["rank 1 says hello"]
    bench.executor.purge(handles[0])
    assert bench.world.jobs() == []


def test_a_failure_says_why(bench):
    (handle,) = bench.launch("fails")
    (result,) = bench.executor.collect([handle], timeout=PATIENCE)
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    assert "ValueError: rank 0 has no data" in result["error"]


def test_a_result_of_the_declared_size_arrives(bench):
    size = bench.executor.capabilities.max_result_bytes
    handles = [
        bench.launch("large", args={"size": more}, run_id=f"run-{more}")[0]
        for more in (size, size + 1)
    ]
    fits, too_large = bench.executor.collect(handles[:1], timeout=PATIENCE), None
    too_large = bench.executor.collect(handles[1:], timeout=PATIENCE)
    assert len(fits[0]["result"]) == size - 2
    assert too_large[0]["status"] == "failed"
    assert str(size) in too_large[0]["error"]


def test_a_cancel_ends_all_processes(bench):
    handles = bench.launch("waits", 2, {"folder": str(bench.folder)})
    pids = [bench.up(rank) for rank in range(2)]
    bench.executor.cancel(handles[0])
    bench.wait(lambda: bench.executor.poll(handles[0]) is ReplicaState.CANCELLED)
    assert not alive(pids[0])
    assert alive(pids[1])
    assert bench.executor.describe(handles[0]).reason is Reason.CANCEL_REQUESTED
    bench.executor.cancel_run(handles[0].run_id)
    bench.wait(lambda: bench.executor.poll(handles[1]) is ReplicaState.CANCELLED)
    assert not alive(pids[1])


def test_a_timeout_is_a_failure(bench):
    (handle,) = bench.launch("waits", args={"folder": str(bench.folder)}, timeout=1.0)
    (result,) = bench.executor.collect([handle], timeout=PATIENCE)
    found = bench.executor.describe(handle)
    assert (found.state, found.reason) == (ReplicaState.FAILED, Reason.TIMEOUT)
    assert result["status"] == "failed"


def test_an_interruption_on_spot_is_the_next_attempt_with_its_checkpoints(bench):
    (handle,) = bench.launch("checkpoints", args={"folder": str(bench.folder)}, spot=True)
    pid = bench.up(0)
    bench.world.job(handle.metadata["job_name"]).interrupt()
    (result,) = bench.executor.collect([handle], timeout=PATIENCE)
    assert result["result"] == [2, "42"]
    assert not alive(pid)
    assert bench.executor.describe(handle).attempt == 2


def test_a_failed_program_is_started_again_in_the_same_job(bench):
    (handle,) = bench.launch("fails_once", max_restarts=1)
    (result,) = bench.executor.collect([handle], timeout=PATIENCE)
    assert result["result"] == 2
    assert bench.executor.describe(handle).attempt == 2


def test_nothing_is_left_when_the_stand_in_stops(bench):
    bench.launch("waits", 2, {"folder": str(bench.folder)})
    pids = [bench.up(rank) for rank in range(2)]
    bench.stand_in.stop()
    assert not any(alive(pid) for pid in pids)
