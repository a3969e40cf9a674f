import sys
from pathlib import Path

import boto3
import botocore.session
import pytest
from botocore.client import ClientCreator
from botocore.hooks import EventAliaser

from diloco_protocol import Backoff
from diloco_sagemaker import SageMakerExecutor

sys.path.insert(0, str(Path(__file__).parent))
from small_aws import SmallAWS

# Every test has sessions of its own; reading the services' models anew for each would take most of
# the time.
LOADER = botocore.session.create_loader()
botocore.session.create_loader = lambda *_: LOADER

# Nor are the methods of clients made anew, of which SageMaker's have 409. A method keeps nothing of
# its client, and each client has a class of its own all the same: executors put bounds into it.
METHODS = {}
_make_methods = ClientCreator._create_methods


def _methods_of(creator, model):
    if model.service_name not in METHODS:
        METHODS[model.service_name] = _make_methods(creator, model)
    return dict(METHODS[model.service_name])


ClientCreator._create_methods = _methods_of

# Each session looks up anew what its hundreds of events are called; the names are always the same.
NAMES = {}
_make_aliaser = EventAliaser.__init__


def _with_shared_names(aliaser, *arguments):
    _make_aliaser(aliaser, *arguments)
    aliaser._alias_name_cache = NAMES


EventAliaser.__init__ = _with_shared_names

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
