"""A stand-in and the real client of it."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from diloco_localcloud import SageMakerStandIn

# Reading the services' models anew for each test would take most of the time.
SESSION = boto3.Session()


class Lab:
    """boto3 without retries, and requests that are right."""

    def __init__(self, stand_in: SageMakerStandIn) -> None:
        self.stand_in, self.world = stand_in, stand_in.world
        self.config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=60,
            read_timeout=60,
            parameter_validation=False,
        )
        self.api = self.client("sagemaker")

    def client(self, service: str, **more: Any) -> Any:
        return SESSION.client(
            service, config=self.config, **{**self.stand_in.client_options, **more}
        )

    @staticmethod
    def request(name: str = "job", /, **more: Any) -> dict[str, Any]:
        base = {
            "TrainingJobName": name,
            "RoleArn": "arn:aws:iam::123456789012:role/training",
            "AlgorithmSpecification": {"TrainingImage": "any:1", "TrainingInputMode": "File"},
            "OutputDataConfig": {"S3OutputPath": "s3://bucket/out", "CompressionType": "NONE"},
            "ResourceConfig": {
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "VolumeSizeInGB": 1,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        }
        return {**base, **more}

    def create(self, name: str = "job", /, **more: Any) -> Any:
        """Create a job; the test's hand on it."""
        self.api.create_training_job(**self.request(name, **more))
        return self.world.job(name)

    def spot(self, name: str = "job", wait: int = 7200) -> Any:
        limits = {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": wait}
        return self.create(name, EnableManagedSpotTraining=True, StoppingCondition=limits)

    def describe(self, name: str = "job") -> dict[str, Any]:
        return self.api.describe_training_job(TrainingJobName=name)

    def history(self, name: str = "job") -> list[str]:
        return [entry["Status"] for entry in self.describe(name)["SecondaryStatusTransitions"]]

    def listed(self, **query: Any) -> list[str]:
        found = self.api.list_training_jobs(**query)["TrainingJobSummaries"]
        return [entry["TrainingJobName"] for entry in found]

    @contextlib.contextmanager
    def refused(self, code: str, message: str, status: int = 400):
        """The call is refused with this code and part of the message."""
        with pytest.raises(ClientError) as caught:
            yield
        answer = caught.value.response
        assert (answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]) == (
            code,
            status,
        )
        assert re.search(message, answer["Error"]["Message"]), answer["Error"]["Message"]


@pytest.fixture
def lab():
    with SageMakerStandIn() as running:
        made = Lab(running)
        yield made
        made.api.close()
