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


# Tests of the standard suite that make thousands of calls of botocore, each of which takes five
# milliseconds of processor time. In the default lane the backend for Kubernetes has them, over HTTP
# too; the slow lane runs all.
LONG = {
    "test_t1_what_another_thread_asks_meanwhile_changes_no_answer",
    "test_t1_what_another_thread_ends_meanwhile_is_all_that_it_ends",
    "test_g3_what_is_written_last_is_not_lost",
    "test_l2_who_cannot_look_names_what_may_live",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.split("::")[1:-1] == ["TestSpot"] and item.originalname in LONG:
            item.add_marker(pytest.mark.slow)


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
