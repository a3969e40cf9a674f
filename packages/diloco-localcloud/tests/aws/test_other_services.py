"""Logs, S3 and STS."""

from __future__ import annotations

import urllib.error
import urllib.request

import boto3
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from diloco_localcloud import SageMakerStandIn

GROUP = "/aws/sagemaker/TrainingJobs"


def texts(answer):
    return [event["message"] for event in answer["events"]]


def test_a_stream_per_attempt(lab):
    logs = lab.client("logs")
    job = lab.spot("run-1")
    with lab.refused("ResourceNotFoundException", "log group does not exist"):
        logs.describe_log_streams(logGroupName=GROUP)
    job.start()
    job.log("one\ntwo\n")
    lab.world.advance(100)
    job.interrupt()
    lab.world.advance(100)
    job.start()
    job.log("three")
    streams = logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix="run-1/")[
        "logStreams"
    ]
    names = [stream["logStreamName"] for stream in streams]
    assert names == ["run-1/algo-1-1767225600", "run-1/algo-1-1767225800"]
    assert texts(logs.get_log_events(logGroupName=GROUP, logStreamName=names[0])) == ["one", "two"]
    first = logs.describe_log_streams(logGroupName=GROUP, limit=1)
    second = logs.describe_log_streams(logGroupName=GROUP, limit=1, nextToken=first["nextToken"])
    assert "nextToken" not in second
    for order in ({"orderBy": "LastEventTime"}, {"descending": True}):
        with lab.refused("InvalidParameterException", "orders streams by their names"):
            logs.describe_log_streams(logGroupName=GROUP, **order)
    with lab.refused("UnknownOperationException", "does not know logs FilterLogEvents"):
        logs.filter_log_events(logGroupName=GROUP)
    logs.delete_log_stream(logGroupName=GROUP, logStreamName=names[0])
    with lab.refused("ResourceNotFoundException", "log stream does not exist"):
        logs.get_log_events(logGroupName=GROUP, logStreamName=names[0])


@pytest.mark.parametrize("forward", [False, True])
def test_events_are_read_until_a_token_comes_again(lab, forward):
    logs = lab.client("logs")
    job = lab.create()
    job.log("\n".join(str(number) for number in range(5)))
    where = {
        "logGroupName": GROUP,
        "logStreamName": f"job/algo-1-{int(lab.world.now())}",
        "limit": 2,
    }
    pages, more = [], {}
    while True:
        answer = logs.get_log_events(**where, startFromHead=forward, **more)
        pages.append(texts(answer))
        token = answer["nextForwardToken" if forward else "nextBackwardToken"]
        if token == more.get("nextToken"):
            break
        more = {"nextToken": token}
    assert pages == (
        [["0", "1"], ["2", "3"], ["4"], []] if forward else [["3", "4"], ["1", "2"], ["0"], []]
    )
    if forward:
        job.log("later")
        assert texts(logs.get_log_events(**where, startFromHead=True, **more)) == ["later"]


def test_logs_call_a_bad_request_an_invalid_parameter(lab):
    logs = lab.client("logs")
    job = lab.create()
    job.log("one")
    stream = f"job/algo-1-{int(lab.world.now())}"
    for refuse, words in (
        (
            lambda: logs.get_log_events(logGroupName=GROUP, logStreamName=stream, limit=10001),
            "10001",
        ),
        (lambda: logs.describe_log_streams(logGroupName=GROUP, orderBy="Size"), "Size"),
        (lambda: logs.describe_log_streams(logGroupName=GROUP, nextToken="no"), "token"),
    ):
        with lab.refused("InvalidParameterException", words):
            refuse()


def test_who_calls(lab):
    sts = lab.client("sts")
    assert sts.get_caller_identity()["Account"] == "123456789012"
    lab.stand_in.faults.add("expired", resource="sts")
    with lab.refused("ExpiredToken", "is expired"):
        sts.get_caller_identity()
    with lab.refused("InvalidAction", "does not know sts GetSessionToken"):
        sts.get_session_token()


@pytest.mark.parametrize(
    ("service", "operation", "code", "status"),
    [
        ("sts", "get_caller_identity", "InvalidClientTokenId", 403),
        ("iam", "simulate_principal_policy", "InvalidClientTokenId", 403),
        ("s3", "list_buckets", "InvalidAccessKeyId", 403),
        ("logs", "describe_log_streams", "UnrecognizedClientException", 400),
    ],
)
def test_whoever_has_an_unknown_key(lab, service, operation, code, status):
    """Services that speak XML have other codes for it, as on AWS; all name the request."""
    stranger = lab.client(service, aws_access_key_id="AKIANOBODY")
    with pytest.raises(ClientError) as caught:
        getattr(stranger, operation)()
    told = caught.value.response
    assert told["Error"]["Code"] == code
    assert told["ResponseMetadata"]["HTTPStatusCode"] == status
    assert told["ResponseMetadata"]["RequestId"]


@pytest.fixture
def s3(lab):
    client = lab.client("s3")
    client.create_bucket(Bucket="bucket")
    return client


def test_objects(s3):
    s3.put_object(Bucket="bucket", Key="a b/ü+%.txt", Body=b"content")
    assert s3.get_object(Bucket="bucket", Key="a b/ü+%.txt")["Body"].read() == b"content"
    assert s3.head_object(Bucket="bucket", Key="a b/ü+%.txt")["ContentLength"] == 7
    assert [each["Key"] for each in s3.list_objects_v2(Bucket="bucket")["Contents"]] == [
        "a b/ü+%.txt"
    ]
    url = s3.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "a b/ü+%.txt"})
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"content"
    s3.delete_object(Bucket="bucket", Key="a b/ü+%.txt")
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket="bucket", Key="a b/ü+%.txt")


def test_conditional_writes(lab, s3):
    tag = s3.put_object(Bucket="bucket", Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    with lab.refused("PreconditionFailed", "", 412):
        s3.put_object(Bucket="bucket", Key="k", Body=b"2", IfNoneMatch="*")
    s3.put_object(Bucket="bucket", Key="k", Body=b"3", IfMatch=tag)
    with lab.refused("PreconditionFailed", "", 412):
        s3.put_object(Bucket="bucket", Key="k", Body=b"4", IfMatch=tag)
    assert s3.get_object(Bucket="bucket", Key="k")["Body"].read() == b"3"


def test_faults_of_s3(lab, s3):
    lab.stand_in.faults.add("throttle", verb="PutObject", resource="s3")
    with lab.refused("SlowDown", "", 503):
        s3.put_object(Bucket="bucket", Key="k", Body=b"1")
    lab.stand_in.faults.add("ambiguous", verb="PutObject", resource="s3")
    with pytest.raises(ConnectionClosedError):
        s3.put_object(Bucket="bucket", Key="k", Body=b"2")
    assert s3.get_object(Bucket="bucket", Key="k")["Body"].read() == b"2"
    assert lab.stand_in.calls.count("PutObject", "s3") == 2
    with lab.refused("InvalidAccessKeyId", "", 403):
        lab.client("s3", aws_access_key_id="AKIANOBODY").list_buckets()


def test_whoever_has_no_key(lab):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(f"{lab.stand_in.url}/bucket/k")


def test_a_new_stand_in_has_no_buckets(lab, s3):
    lab.stand_in.stop()
    lab.stand_in.start()
    with pytest.raises(ClientError, match="NoSuchBucket"):
        lab.client("s3").list_objects_v2(Bucket="bucket")


def test_what_a_launcher_asks_beforehand(lab):
    habits = lab.world.habits
    habits.quotas = {"ml.g6.xlarge": 3}
    habits.missing_images = {"trainer:2"}
    quotas = lab.client("service-quotas").list_service_quotas(ServiceCode="sagemaker")["Quotas"]
    assert [(quota["QuotaName"], quota["Value"]) for quota in quotas] == [
        ("ml.g6.xlarge for training job usage", 3.0),
        ("ml.g6.xlarge for spot training job usage", 3.0),
    ]
    ecr = lab.client("ecr")
    found = ecr.describe_images(repositoryName="trainer", imageIds=[{"imageTag": "1"}])
    assert found["imageDetails"][0]["imageTags"] == ["1"]
    with pytest.raises(ClientError, match="ImageNotFoundException"):
        ecr.describe_images(repositoryName="trainer", imageIds=[{"imageTag": "2"}])


def test_what_iam_simulates(lab):
    iam, role = lab.client("iam"), "arn:aws:iam::123456789012:role/training"

    def decision(source, action, resource):
        answer = iam.simulate_principal_policy(
            PolicySourceArn=source, ActionNames=[action], ResourceArns=[resource]
        )
        return answer["EvaluationResults"][0]["EvalDecision"]

    me = "arn:aws:iam::123456789012:user/me"
    assert decision(me, "iam:PassRole", role) == "allowed"
    lab.world.habits.refused_roles = {role}
    assert decision(me, "iam:PassRole", role) == "implicitDeny"
    assert decision(role, "s3:PutObject", "arn:aws:s3:::bucket/x") == "allowed"
    lab.world.habits.roles_without_rights = {role}
    assert decision(role, "s3:PutObject", "arn:aws:s3:::bucket/x") == "implicitDeny"
    with pytest.raises(ClientError, match="does not know iam ListRoles"):
        iam.list_roles()


def test_two_stand_ins_have_buckets_of_their_own():
    with SageMakerStandIn() as one, SageMakerStandIn() as other:
        here = boto3.client("s3", **one.client_options)
        there = boto3.client("s3", **other.client_options)
        here.create_bucket(Bucket="bucket")
        here.put_object(Bucket="bucket", Key="key", Body=b"here")
        assert there.list_buckets()["Buckets"] == []
        there.create_bucket(Bucket="bucket")
        assert "Contents" not in there.list_objects_v2(Bucket="bucket")
        there.put_object(Bucket="bucket", Key="key", Body=b"there")
        assert here.get_object(Bucket="bucket", Key="key")["Body"].read() == b"here"
        versions = {"Status": "Enabled"}
        here.put_bucket_versioning(Bucket="bucket", VersioningConfiguration=versions)
        here.delete_object(Bucket="bucket", Key="key")
        one.stop()
        assert there.get_object(Bucket="bucket", Key="key")["Body"].read() == b"there"
        with SageMakerStandIn() as third:
            assert boto3.client("s3", **third.client_options).list_buckets()["Buckets"] == []


def test_other_users_of_moto_keep_their_buckets(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with SageMakerStandIn() as stand_in:
        from moto.s3.models import s3_backends

        theirs = s3_backends["123456789012"]["aws"]
        theirs.create_bucket("theirs", "us-east-1")
        client = boto3.client("s3", **stand_in.client_options)
        assert client.list_buckets()["Buckets"] == []
        client.create_bucket(Bucket="theirs")
    assert s3_backends["123456789012"]["aws"].buckets.keys() == {"theirs"}
    theirs.reset()
