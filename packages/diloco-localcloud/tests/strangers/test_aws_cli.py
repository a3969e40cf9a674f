"""AWS's command line against the stand-in: it checks answers and waits by its own rules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_localcloud import SageMakerStandIn

pytestmark = pytest.mark.strangers

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
REQUEST = {
    "AlgorithmSpecification": {"TrainingImage": "any:1", "TrainingInputMode": "File"},
    "RoleArn": "arn:aws:iam::123456789012:role/training",
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out", "CompressionType": "NONE"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
}


class Refused(Exception):
    """The command ended with an error; its text is what the command printed."""


class CommandLine:
    """``aws``, with a stand-in of its own and no configuration of this machine."""

    def __init__(self, stand_in, folder):
        self.stand_in, self.world, self.folder = stand_in, stand_in.world, folder
        self._environment = {
            **{key: text for key, text in os.environ.items() if not key.startswith("AWS_")},
            **stand_in.environment,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_MAX_ATTEMPTS": "1",
        }

    def __call__(self, *arguments, stdin=""):
        done = subprocess.run(
            [Path(sys.executable).with_name("aws"), *arguments, "--output", "json"],
            input=stdin,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refused(done.stderr.strip())
        return done.stdout

    def json(self, *arguments):
        return json.loads(self(*arguments))

    def create(self, name):
        """Create a training job; the test's hand on it."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"TrainingJobName": name, **REQUEST}), encoding="utf-8")
        self("sagemaker", "create-training-job", "--cli-input-json", path.as_uri())
        return self.world.job(name)

    def describe(self, name):
        return self.json("sagemaker", "describe-training-job", "--training-job-name", name)


@pytest.fixture
def aws(tmp_path):
    with SageMakerStandIn() as stand_in:
        yield CommandLine(stand_in, tmp_path)


def test_a_job_from_its_create_to_its_delete(aws):
    aws.create("first").start()
    described = aws.describe("first")
    assert described["TrainingJobStatus"] == "InProgress"
    assert described["SecondaryStatus"] == "Training"
    assert described["ResourceConfig"] == REQUEST["ResourceConfig"]
    aws.world.job("first").succeed()
    aws.world.settle()
    assert aws.describe("first")["TrainingJobStatus"] == "Completed"
    aws("sagemaker", "delete-training-job", "--training-job-name", "first")
    with pytest.raises(Refused, match=r"\(ValidationException\).*Requested resource not found"):
        aws.describe("first")


def test_what_aws_refuses_is_refused(aws):
    aws.create("first").succeed()
    aws.world.settle()
    with pytest.raises(Refused, match=r"\(ResourceInUse\).*must be unique"):
        aws.create("first")
    with pytest.raises(Refused, match=r"\(ValidationException\).*is in status Completed"):
        aws("sagemaker", "stop-training-job", "--training-job-name", "first")
    with pytest.raises(Refused, match=r"\(ValidationException\).*Requested resource not found"):
        aws("sagemaker", "stop-training-job", "--training-job-name", "nobody")


def test_lists_are_paged_by_the_command_itself(aws):
    names = [f"job-{number}" for number in range(5)]
    for name in names:
        aws.create(name)
        aws.world.advance(1)
    listed = aws.json(
        "sagemaker", "list-training-jobs", "--page-size", "2", "--sort-order", "Ascending"
    )
    assert [each["TrainingJobName"] for each in listed["TrainingJobSummaries"]] == names
    some = aws.json(
        "sagemaker", "list-training-jobs", "--max-items", "3", "--name-contains", "job-"
    )
    assert len(some["TrainingJobSummaries"]) == 3
    assert "NextToken" in some


def test_search_finds_jobs_by_name(aws):
    for name in ("red-1", "red-2", "blue-1"):
        aws.create(name)
    found = aws.json(
        "sagemaker",
        "search",
        "--resource",
        "TrainingJob",
        "--search-expression",
        json.dumps(
            {"Filters": [{"Name": "TrainingJobName", "Operator": "Contains", "Value": "red"}]}
        ),
    )
    names = {each["TrainingJob"]["TrainingJobName"] for each in found["Results"]}
    assert names == {"red-1", "red-2"}


def test_the_command_waits_for_an_end_and_tells_a_failure_from_it(aws):
    aws.create("done").succeed()
    aws.create("stopped").start()
    aws("sagemaker", "stop-training-job", "--training-job-name", "stopped")
    aws.create("failed").fail(3, "no data")
    aws.world.settle()
    wait = ("sagemaker", "wait", "training-job-completed-or-stopped", "--training-job-name")
    # Each is decided at the command's first look: between two of them, it would sleep for two
    # minutes.
    aws(*wait, "done")
    aws(*wait, "stopped")
    with pytest.raises(Refused, match="terminal failure state"):
        aws(*wait, "failed")
    assert aws.describe("failed")["FailureReason"] == "AlgorithmError: no data, exit code: 3"


def test_logs_are_read_line_by_line(aws):
    job = aws.create("talker")
    job.start()
    job.log("one\ntwo")
    streams = aws.json("logs", "describe-log-streams", "--log-group-name", LOG_GROUP)["logStreams"]
    (name,) = [each["logStreamName"] for each in streams]
    assert name.startswith("talker/algo-1-")
    events = aws.json(
        "logs",
        "get-log-events",
        "--log-group-name",
        LOG_GROUP,
        "--log-stream-name",
        name,
        "--start-from-head",
    )
    assert [each["message"] for each in events["events"]] == ["one", "two"]


def test_files_in_s3(aws):
    aws("s3", "mb", "s3://some-bucket")
    aws("s3", "cp", "-", "s3://some-bucket/folder/file", stdin="hello")
    assert aws("s3", "cp", "s3://some-bucket/folder/file", "-") == "hello"
    assert aws("s3", "ls", "s3://some-bucket", "--recursive").split()[-1] == "folder/file"


def test_who_one_is(aws):
    assert aws.json("sts", "get-caller-identity")["Account"] == "123456789012"
