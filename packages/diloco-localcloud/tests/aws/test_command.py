"""``python -m diloco_localcloud aws``, and real time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import boto3
import pytest
from botocore.exceptions import ClientError
from standin_lab import PATIENCE

from diloco_localcloud import SageMakerStandIn
from diloco_localcloud.__main__ import main

REQUEST = {
    "TrainingJobName": "job",
    "RoleArn": "arn:aws:iam::123456789012:role/training",
    "AlgorithmSpecification": {"TrainingImage": "any:1", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
}


def until_it_ends(api):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        told = api.describe_training_job(TrainingJobName="job")
        if told["TrainingJobStatus"] != "InProgress":
            return told
        time.sleep(0.05)
    pytest.fail(f"the job does not end: {told}")


@pytest.mark.processes
def test_the_command(monkeypatch):
    command = [sys.executable, "-m", "diloco_localcloud", "aws", "--region", "eu-west-1"]
    command += ["--bucket", "mine", "--bucket", "other"]
    request = {**REQUEST}
    request["AlgorithmSpecification"] = {
        **REQUEST["AlgorithmSpecification"],
        "ContainerEntrypoint": [sys.executable, "-c", "import sys; sys.exit(7)"],
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        lines = [running.stdout.readline() for _ in range(5)]
        for line in lines[:4]:
            name, value = line.removeprefix("export ").strip().split("=", 1)
            monkeypatch.setenv(name, value)
        assert "Ctrl-C ends it" in lines[4]
        api = boto3.Session().client("sagemaker")
        arn = api.create_training_job(**request)["TrainingJobArn"]
        assert arn == "arn:aws:sagemaker:eu-west-1:123456789012:training-job/job"
        told = until_it_ends(api)
        assert told["TrainingJobStatus"] == "Failed"
        assert told["FailureReason"].endswith("exit code: 7")
        api.close()
        s3 = boto3.Session().client("s3")
        assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["mine", "other"]
        s3.close()
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 0


def test_a_wrong_bucket_is_refused_before_anything_starts(capsys):
    with pytest.raises(SystemExit):
        main(["aws", "--bucket", "Mine"])
    assert "'Mine' is not the name of a bucket: 3 to 63" in capsys.readouterr().err


def test_a_client_of_another_region_is_told_where_it_is():
    with SageMakerStandIn() as stand_in:
        options = {**stand_in.client_options, "region_name": "eu-west-1"}
        api = boto3.client("sagemaker", **options)
        with pytest.raises(
            ClientError, match=r"is in us-east-1, not in eu-west-1.*--region eu-west-1"
        ):
            api.list_training_jobs()
        api.close()


def test_in_real_time_nobody_moves_the_clock():
    with SageMakerStandIn(real_time=True) as stand_in:
        assert abs(stand_in.world.now() - time.time()) < PATIENCE
        for move in (lambda: stand_in.world.advance(1), stand_in.world.settle, stand_in.world.step):
            with pytest.raises(ValueError, match="its clock cannot be moved"):
                move()
