"""What is wrong is named before the first call that creates anything."""

import boto3
import pytest
from botocore.config import Config
from scripted_aws import AWSHarness

from diloco_protocol import AuthError, InvalidRequestError


def launch(executor, **options):
    return executor.launch_replicas(2, "trainer:train", run_id="run-1", **options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_overlay": {"VpcConfig": {"Subnets": "all"}}}, "VpcConfig.Subnets.*valid types"),
        ({"subnets": ["subnet-1"]}, "Invalid length for parameter VpcConfig.SecurityGroupIds"),
        ({"request_overlay": {"NoSuchField": 1}}, 'Unknown parameter in input: "NoSuchField"'),
        ({"tags": {str(number): "x" for number in range(60)}}, "63 tags .* at most 49"),
        ({"cpu_instance_type": "m5.large"}, "cpu_instance_type must be an instance type"),
        ({"endpoint_url": "localhost:80"}, "must be an address with its scheme"),
        ({"endpoint_url": "ftp://localhost"}, "must be an address with its scheme"),
        ({"session": "me"}, "session must be a boto3.Session, not a value of type str"),
        ({"image_uri": "a b"}, "such as '123456789012.dkr"),
        ({"output_s3_path": "s3://b/runs"}, "3 to 63 lower-case letters"),
    ],
)
def test_options_that_only_a_launch_shows_to_be_wrong(aws, executor, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        launch(executor(**options))
    assert aws.calls == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "positive number of seconds"),
        ({"timeout": float("nan")}, "positive number of seconds"),
        ({"timeout": "1h"}, "positive number of seconds"),
        ({"env": {"1A": "x"}}, "no digit at the beginning"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"labels": {str(number): "x" for number in range(49)}}, "52 tags .* at most 49"),
    ],
)
def test_launches_that_are_wrong(aws, executor, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        launch(executor(), **options)
    assert aws.calls == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_uri": "x" * 300}, "trainingImage"),
        ({"tags": {"team": "x" * 300}}, "tags"),
        ({"security_group_ids": ["bad id!"], "subnets": ["subnet-1"]}, "securityGroupIds"),
        ({"cpu_instance_type": "ml.nope.xlarge"}, "instanceType"),
    ],
)
def test_what_the_service_refuses_is_an_error_and_starts_nothing(options, words):
    """The first job is created alone."""
    world = AWSHarness()
    try:
        with pytest.raises(InvalidRequestError, match=f"(?i){words}"):
            launch(world.make_executor(**options))
        assert world.world.jobs() == []
    finally:
        world.close()


@pytest.fixture
def no_credentials(monkeypatch):
    """Nobody has logged in here."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_clients_of_ones_own(aws, executor):
    """They are used, and left open; one that tries again itself may lose an answer."""
    session = boto3.Session("key", "secret", region_name="eu-west-1")
    once = Config(retries={"total_max_attempts": 1})
    own = {
        f"{name}_client": session.client(service, endpoint_url=aws.url, config=once)
        for name, service in (("sagemaker", "sagemaker"), ("logs", "logs"))
    }
    sent, closed = [], []
    own["sagemaker_client"].close = lambda: closed.append(1)
    own["sagemaker_client"].meta.events.register("before-send", lambda **_: sent.append(1))
    for _ in range(2):
        with executor(**own) as ours:
            assert ours.list_runs() == []
    assert (len(sent), closed) == (2, [])
    with pytest.raises(InvalidRequestError, match="'total_max_attempts': 1"):
        executor(sagemaker_client=session.client("sagemaker", endpoint_url=aws.url))
    with pytest.raises(InvalidRequestError, match="This one is of type str"):
        executor(logs_client="me")


def test_no_credentials(aws, executor, no_credentials):
    ours = executor(session=boto3.Session(region_name="eu-west-1"))
    with pytest.raises(AuthError, match="Log in"):
        launch(ours)
    (finding,) = ours.check()
    assert (finding.subject, finding.ok) == ("credentials", False)
    assert aws.calls == []


def test_a_profile_that_is_not_there(aws, offline, no_credentials, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(AuthError, match="nobodys"):
        launch(offline(endpoint_url=aws.url, region="eu-west-1"))
    assert aws.calls == []


def test_another_address_may_have_regions_of_its_own(executor):
    assert executor(region="eu-mars-1").list_runs() == []


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")

    __str__ = __repr__


def nested(levels):
    inner = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


ODD = [
    ("command", "python 'x", r"write \['python', \"'x\"\]"),
    ("command", '{"password": "hunter2Canary9"}', r"write \[.*redacted.*\]$"),
    ("command", "run --auth Basic hunter2Canary9", r"write \[.*redacted.*\]$"),
    ("command", "PASSWORD = hunter2Canary9", r"write \[.*redacted.*\]$"),
    *((name, 10**5000, "a number of that size") for name in ("role_arn", "spot", "instance_type")),
    *((name, Unshowable(), "cannot be shown")
      for name in ("role_arn", "spot", "instance_type", "region")),
    *(("request_overlay", {"VpcConfig": nested(levels)}, "nested") for levels in (900, 100_000)),
    ("request_overlay", {"VpcConfig": {"Subnets": ["\ud800"]}}, "half of a surrogate pair"),
    ("session", type("Odd", (), {"client": print})(), "must be a boto3.Session"),
    *(("region", region, "name of a region") for region in ("eu-west-1\n", "", "eu west", "é")),
    ("command", ["a\ud800"], "half of a surrogate pair"),
    ("output_s3_path", "s3://bucket/\ud800", "must be a place in S3"),
    ("image_uri", "a\ud800", "name of a container image"),
    ("role_arn", "arn:aws:iam::123456789012:role/\ud800", "ARN of an IAM role"),
    ("endpoint_url", "http://a\ud800", "address with its scheme"),
]  # fmt: skip


# Some of them have no text by which a test could be called.
@pytest.mark.parametrize(("name", "value", "words"), ODD, ids=map(str, range(len(ODD))))
def test_odd_options_are_refused_by_name(offline, name, value, words):
    with pytest.raises(InvalidRequestError, match=f"{name}.*{words}"):
        offline(**{name: value}).plan(1, "trainer:train")


def test_a_prefix_that_no_run_can_have_is_refused_at_once(offline):
    with pytest.raises(InvalidRequestError, match="run_id='Bad Name!' cannot begin"):
        offline(run_id="Bad Name!")
