"""AWS's own SDK of SageMaker against the stand-in: it parses every answer into typed objects."""

import os
import subprocess
import sys

import pytest

from diloco_localcloud import SageMakerStandIn

pytestmark = pytest.mark.strangers

JOBS = """
import sys

from sagemaker.core.resources import TrainingJob
from sagemaker.core.shapes import (
    AlgorithmSpecification,
    OutputDataConfig,
    ResourceConfig,
    StoppingCondition,
)
from sagemaker.core.utils.utils import configure_logging

configure_logging("INFO")  # the jobs' lines go to the SDK's own log


def create(name):
    return TrainingJob.create(
        training_job_name=name,
        role_arn="arn:aws:iam::123456789012:role/training",
        algorithm_specification=AlgorithmSpecification(
            training_image="any:1", training_input_mode="File"
        ),
        output_data_config=OutputDataConfig(s3_output_path="s3://bucket/out"),
        resource_config=ResourceConfig(
            instance_type="ml.m5.large", instance_count=1, volume_size_in_gb=1
        ),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=3600),
    )


def say(*words):
    print("SAYS", *words, flush=True)


def let(happen):
    # The test does something with the stand-in now.
    say("let", happen)
    sys.stdin.readline()
"""


class Program:
    """A program that uses the SDK. Real time, since the SDK looks again after real seconds."""

    def __init__(self, stand_in, folder):
        self.stand_in, self.world, self._folder = stand_in, stand_in.world, folder

    def run(self, text, **happens):
        """What it printed and said; each ``let(name)`` that it says calls ``happens[name]()``."""
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
            **self.stand_in.environment,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        printed, said = [], []
        with (
            (self._folder / "errors").open("w+") as errors,
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", JOBS + text],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            for line in process.stdout:
                words = line.split()
                if words[:2] == ["SAYS", "let"]:
                    happens[words[2]]()
                    process.stdin.write("\n")
                    process.stdin.flush()
                elif words[:1] == ["SAYS"]:
                    said.append(" ".join(words[1:]))
                else:
                    printed.append(line)
            assert process.wait() == 0, (self._folder / "errors").read_text()
        return "".join(printed) + (self._folder / "errors").read_text(), said


@pytest.fixture
def program(tmp_path):
    with SageMakerStandIn(real_time=True) as stand_in:
        yield Program(stand_in, tmp_path)


def test_a_job_that_trains_logs_and_succeeds(program):
    def train():
        job = program.world.job("first")
        job.start()
        job.log("epoch 1 of 1")
        job.succeed()

    printed, said = program.run(
        """
job = create("first")
say(job.training_job_status)
let("train")
job.wait(poll=1, logs=True)
say(job.training_job_status, job.secondary_status_transitions[-1].status)
say(TrainingJob.get("first").training_job_arn)
say(*sorted(each.training_job_name for each in TrainingJob.get_all()))
""",
        train=train,
    )
    assert said == [
        "InProgress",
        "Completed Completed",
        "arn:aws:sagemaker:us-east-1:123456789012:training-job/first",
        "first",
    ]
    assert "epoch 1 of 1" in printed


def test_a_stop_and_a_failure(program):
    _, said = program.run(
        """
from sagemaker.core.utils.exceptions import FailedStatusError

job = create("second")
job.stop()
job.wait(poll=1)
say(job.training_job_status)
job = create("third")
let("fail")
try:
    job.wait(poll=1)
except FailedStatusError as error:
    say(error)
""",
        fail=lambda: program.world.job("third").fail(3, "no data"),
    )
    assert said[0] == "Stopped"
    assert "AlgorithmError: no data, exit code: 3" in said[1]
