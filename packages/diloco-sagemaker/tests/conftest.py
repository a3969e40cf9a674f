import sys
from pathlib import Path

import boto3
import pytest

from diloco_protocol import Backoff
from diloco_sagemaker import SageMakerExecutor

sys.path.insert(0, str(Path(__file__).parent))
import quick_botocore  # noqa: F401 - before any session is made
from small_aws import SmallAWS

REQUIRED = {
    "role_arn": "arn:aws:iam::123456789012:role/trainer",
    "image_uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:1",
    "output_s3_path": "s3://bucket/runs",
}


@pytest.fixture
def aws():
    small = SmallAWS()
    try:
        yield small
    finally:
        small.close()


@pytest.fixture
def executor(aws):
    """Makes executors that ask the small AWS."""
    made = []

    def make(**options):
        session = boto3.Session("key", "secret", region_name=options.pop("region", "eu-west-1"))
        backoff = Backoff(first=1.0, factor=1.5, cap=20.0, clock=aws.clock, sleep=aws.sleep)
        options = {"endpoint_url": aws.url, "session": session, "backoff": backoff, **options}
        made.append(SageMakerExecutor(**{**REQUIRED, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def offline():
    """Makes executors that must not make a call."""

    def make(**options):
        return SageMakerExecutor(**{**REQUIRED, **options})

    return make
