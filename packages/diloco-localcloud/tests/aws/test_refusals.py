"""What is refused: by the service model, by faults, by rates, and for want of credentials."""

from __future__ import annotations

import boto3
import pytest
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError

from diloco_localcloud import SageMakerStandIn, StandInError
from diloco_localcloud._aws._model._check import compiled, load


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"TrainingJobName": "bad_name"},
            r"^1 validation error detected: Value 'bad_name' at 'trainingJobName' failed to "
            r"satisfy constraint: Member must satisfy regular expression pattern: \[a-zA-Z0-9\]",
        ),
        ({"TrainingJobName": "x" * 64}, "Member must have length less than or equal to 63"),
        (
            {"RoleArn": None},
            "Value null at 'roleArn' failed to satisfy constraint: Member must not be null",
        ),
        ({"RoleArn": "arn:aws:iam::1:user/somebody"}, "at 'roleArn' .* regular expression pattern"),
        (
            {"Environment": {"A": "x" * 513}},
            "at 'environment.A'.*less than or equal to 512",
        ),
        ({"Environment": {"1-A": "x"}}, "at 'environment.1-A'.*pattern"),
        (
            {"Environment": {f"A{n}": "x" for n in range(101)}},
            "at 'environment'.*less than or equal to 100",
        ),
        ({"HyperParameters": {"a": "one\ntwo"}}, "at 'hyperParameters.a'.*pattern: \\.\\*"),
        (
            {"Tags": [{"Key": "a", "Value": "é/ü 1"}, {"Key": "*", "Value": ""}]},
            "^1 .* at 'tags.2.member.key'",
        ),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 0}}, "value greater than or equal to 1"),
        ({"EnableManagedSpotTraining": True}, "Invalid MaxWaitTimeInSeconds"),
        (
            {"StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9}},
            "MaxWaitTimeInSeconds above 0",
        ),
    ],
)
def test_requests_that_break_the_model(lab, wrong, message):
    with lab.refused("ValidationException", message):
        lab.api.create_training_job(**lab.request(**wrong))
    assert lab.world.jobs() == []


def test_an_unknown_type_of_instance_and_what_is_allowed(lab):
    resources = {**lab.request()["ResourceConfig"], "InstanceType": "ml.nope"}
    with lab.refused(
        "ValidationException",
        r"at 'resourceConfig.instanceType'.*enum value set: \[.*ml\.p5\.48xlarge",
    ):
        lab.create(ResourceConfig=resources)


def test_every_pattern_of_a_create_compiles():
    model = load("sagemaker")
    seen, to_see = set(), [model.operation_model("CreateTrainingJob").input_shape]
    while to_see:
        shape = to_see.pop()
        if shape.name in seen:
            continue
        seen.add(shape.name)
        compiled(shape.metadata.get("pattern", ""))
        to_see += getattr(shape, "members", {}).values()
        to_see += [
            getattr(shape, part) for part in ("member", "key", "value") if hasattr(shape, part)
        ]
    assert len(seen) > 100


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        ("throttle", "ThrottlingException", 400),
        ("server_error", "InternalFailure", 500),
        ("unavailable", "ServiceUnavailable", 503),
        ("unauthorized", "UnrecognizedClientException", 400),
        ("expired", "ExpiredTokenException", 400),
        ("forbidden", "AccessDeniedException", 400),
    ],
)
def test_faults(lab, kind, code, status):
    lab.create()
    lab.stand_in.faults.add(kind, verb="DescribeTrainingJob", resource="sagemaker")
    assert lab.listed() == ["job"]
    with lab.refused(code, "", status):
        lab.describe()
    lab.describe()


@pytest.mark.parametrize(("kind", "exists"), [("cut", False), ("ambiguous", True)])
def test_a_create_whose_answer_is_lost(lab, kind, exists):
    lab.stand_in.faults.add(kind, verb="CreateTrainingJob")
    with pytest.raises(ConnectionClosedError):
        lab.create()
    assert bool(lab.world.jobs()) is exists


def test_rates_hold_on_the_virtual_clock(lab):
    lab.world.habits.rates["ListTrainingJobs"] = 2.0
    for _ in range(2):
        lab.listed()
    with lab.refused("ThrottlingException", "Rate exceeded"):
        lab.listed()
    lab.create()
    lab.world.advance(0.5)
    lab.listed()
    with lab.refused("ThrottlingException", "Rate exceeded"):
        lab.listed()


def test_calls_are_counted(lab):
    lab.create("run")
    with lab.refused("ValidationException", ""):
        lab.describe("none")
    assert [(call.verb, call.resource, call.name, call.status) for call in lab.stand_in.calls] == [
        ("CreateTrainingJob", "sagemaker", "run", 200),
        ("DescribeTrainingJob", "sagemaker", "none", 400),
    ]


def test_other_keys_and_other_regions(lab):
    with lab.refused(
        "UnrecognizedClientException", "security token included in the request is invalid"
    ):
        lab.client("sagemaker", aws_access_key_id="AKIANOBODY").list_training_jobs()
    with lab.refused("InvalidSignatureException", "is in us-east-1, not in eu-west-1"):
        lab.client("sagemaker", region_name="eu-west-1").list_training_jobs()


def test_operations_that_are_not_there(lab):
    with lab.refused(
        "UnknownOperationException",
        "does not know sagemaker ListModels; it knows .*StopTrainingJob",
    ):
        lab.api.list_models()


def test_its_environment_is_all_that_a_client_needs(monkeypatch, lab):
    for name, value in lab.stand_in.environment.items():
        monkeypatch.setenv(name, value)
    lab.create()
    assert boto3.Session().client("sagemaker").describe_training_job(TrainingJobName="job")


def test_nothing_listens_any_more(lab):
    lab.stand_in.stop()
    lab.stand_in.stop()
    with pytest.raises((ConnectionClosedError, EndpointConnectionError)):
        lab.listed()


def test_a_stand_in_that_cannot_start(lab):
    with pytest.raises(StandInError, match="port must be from 0 to 65535, not 99999"):
        SageMakerStandIn(port=99999)
    with pytest.raises(StandInError, match="already running"):
        lab.stand_in.start()
    with pytest.raises(StandInError, match="cannot be used"):
        SageMakerStandIn(port=int(lab.stand_in.url.rpartition(":")[2])).start()
    with pytest.raises(StandInError, match="not started"):
        _ = SageMakerStandIn().url
