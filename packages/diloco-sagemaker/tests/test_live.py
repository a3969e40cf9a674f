"""What can be seen of AWS itself, for less than a dollar; and the same on this machine.

The image needs only diloco-protocol.
"""

import functools
import os
import sys

import boto3
import pytest
from live_aws import live_options

from diloco_localcloud import SageMakerProcesses
from diloco_protocol import Backoff
from diloco_sagemaker import SageMakerExecutor

PATIENCE = 1800.0


class Live:
    """A run that succeeds, one that is cancelled, and what is known of them."""

    @pytest.fixture
    def execute(self):
        raise NotImplementedError

    def test_a_run(self, execute):
        with execute() as executor:
            handles = executor.launch_replicas(2, "builtins:dict", {"a": 1}, timeout=600)
            try:
                results = executor.collect(handles, timeout=PATIENCE)
                assert [(each["status"], each["result"]) for each in results] == [
                    ("succeeded", {"a": 1})
                ] * 2, results
                with execute() as another:
                    assert another.attach(handles[0].run_id) == handles
                    assert another.collect(handles) == results
            finally:
                end(executor, handles[0].run_id)

    def test_a_cancelled_run(self, execute):
        with execute() as executor:
            (handle,) = executor.launch_replicas(
                1,
                "subprocess:call",
                {"args": "echo up; exec sleep 600", "shell": True},
                timeout=1200,
            )
            try:
                lines = executor.log_iter(handle, follow=True)
                assert next(line for line in lines if line == "up")
                status = executor.describe(handle)
                assert (status.state, status.attempt) == ("running", 1)
                executor.cancel(handle)
                (result,) = executor.collect([handle], timeout=PATIENCE)
                assert (result["status"], result["reason"]) == ("cancelled", "cancel_requested")
            finally:
                end(executor, handle.run_id)

    def test_a_run_that_fails(self, execute):
        with execute() as executor:
            (handle,) = executor.launch_replicas(1, "json:loads", {"s": "{"}, timeout=600)
            try:
                (result,) = executor.collect([handle], timeout=PATIENCE)
                assert (result["status"], result["exit_code"]) == ("failed", 1)
                assert "JSONDecodeError" in result["error"]
            finally:
                end(executor, handle.run_id)


def end(executor, run_id):
    """Leave nothing of a run."""
    executor.cancel_run(run_id)
    handles = executor.attach(run_id)
    executor.collect(handles, timeout=PATIENCE)
    executor.purge(handles[0])
    assert run_id not in executor.list_runs()


@pytest.mark.live
class TestLive(Live):
    """An account of yours, as ``live_aws`` names it."""

    @pytest.fixture
    def execute(self):
        return functools.partial(SageMakerExecutor, **live_options())


@pytest.mark.processes
@pytest.mark.slow
class TestHere(Live):
    """What ``TestLive`` does, on this machine."""

    @pytest.fixture
    def execute(self):
        with SageMakerProcesses(kill_seconds=10.0) as stand_in:
            known = stand_in.client_options
            s3 = boto3.client("s3", **known)
            s3.create_bucket(Bucket="bucket")
            s3.close()
            session = boto3.Session(
                known["aws_access_key_id"],
                known["aws_secret_access_key"],
                region_name=known["region_name"],
            )
            yield functools.partial(
                SageMakerExecutor,
                role_arn="arn:aws:iam::123456789012:role/trainer",
                image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
                output_s3_path="s3://bucket/runs",
                endpoint_url=stand_in.url,
                session=session,
                command=[sys.executable, "-m", "diloco_protocol.runner"],
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                grace=2.0,
                backoff=Backoff(first=0.1, cap=0.5),
            )
