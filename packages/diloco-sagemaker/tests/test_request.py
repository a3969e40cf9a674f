"""What is sent, and what is refused before anything is."""

import json

import pytest

from diloco_protocol import InvalidRequestError, spec_from_environment
from diloco_protocol.backend import REDACTED, variables_from_strings
from diloco_sagemaker._request._model import check_request


def plan(executor, n=2, **options):
    args = options.pop("args", None)
    return executor.plan(n, "trainer:train", args, run_id="run-1", **options).requests


def test_names_are_never_cut(offline):
    long = "a" * 48
    jobs = (
        offline()
        .plan(3, "trainer:train", run_id=long, rank_offset=9_990, world_size=10_000)
        .requests
    )
    assert [job["TrainingJobName"] for job in jobs] == [
        f"diloco-{long}-0{rank}" for rank in (9_990, 9_991, 9_992)
    ]
    for job in jobs:
        check_request(job)


def test_arguments_arrive_as_they_are(offline):
    args = {"nested": {"list": [1, 2.5, None, "ü" * 3000]}}
    job = plan(offline(), args=args)[1]
    spec = spec_from_environment(job["HyperParameters"])
    assert (spec.rank, spec.world_size, spec.kwargs) == (1, 2, args)
    assert max(map(len, job["HyperParameters"].values())) <= 2500
    assert all("\n" not in text for text in job["HyperParameters"].values())


def test_what_is_too_large_is_refused_by_size(offline):
    with pytest.raises(InvalidRequestError, match=r"\d{6} bytes of JSON.*URI in entrypoint_args"):
        plan(offline(), args={"blob": "x" * 300_000})


def test_the_runner_itself_is_the_entrypoint(offline):
    algorithm = plan(offline(), max_restarts=2)[0]["AlgorithmSpecification"]
    assert algorithm["ContainerEntrypoint"] == ["python", "-m", "diloco_protocol.runner"]
    words = algorithm["ContainerArguments"]
    assert words[words.index("--restarts") + 1] == "2"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("gpu", "kind", "volume"),
    [
        (None, "ml.m5.xlarge", True),
        ("H100", "ml.p5.4xlarge", False),
        ("H100:8", "ml.p5.48xlarge", False),
        ("H100:2", "ml.p5.48xlarge", False),
        ("A10G:4", "ml.g5.12xlarge", False),
        ("2", "ml.g5.12xlarge", False),
        ("ml.g6.2xlarge", "ml.g6.2xlarge", False),
        ("V100", "ml.p3.2xlarge", True),
    ],
)
def test_instance_types(offline, gpu, kind, volume):
    resources = plan(offline(), gpu=gpu)[0]["ResourceConfig"]
    if gpu != "2":
        assert resources["InstanceType"] == kind
    assert resources["InstanceCount"] == 1
    if gpu != "2":
        assert ("VolumeSizeInGB" in resources) is volume


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gpu": "GB300"}, "known are A100"),
        ({"gpu": "H100:9"}, "at most 8"),
        ({"secrets": {"TOKEN": "x"}}, "Secrets Manager"),
        ({"cpu": 4}, "whole instance"),
        ({"memory": "4Gi"}, "whole instance"),
        ({"timeout": None}, "cannot be honoured"),
        ({"timeout": 28 * 86_400}, "cannot be honoured"),
        ({"timeout": 20 * 86_400, "max_restarts": 1}, "28 days"),
        ({"labels": {"diloco:x": "y"}}, "may not set"),
    ],
)
def test_launches_that_are_refused(offline, options, text):
    with pytest.raises(InvalidRequestError, match=text):
        plan(offline(), **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("role_arn", "trainer"),
        ("image_uri", "two words"),
        ("output_s3_path", "/tmp"),
        ("instance_type", "g5.xlarge"),
        ("tags", {"aws:x": "y"}),
        ("volume_size_gb", 0),
        ("spot", "yes"),
        ("grace", 111),
        ("command", "python -m runner"),
    ],
)
def test_options_that_are_refused(offline, option, value):
    with pytest.raises(InvalidRequestError, match=option):
        offline(**{option: value})


def test_spot(offline):
    job = plan(offline(spot=True, pending_timeout=600), timeout=100)[1]
    assert job["EnableManagedSpotTraining"] is True
    stopping = job["StoppingCondition"]
    assert stopping["MaxWaitTimeInSeconds"] == stopping["MaxRuntimeInSeconds"] + 600
    assert job["CheckpointConfig"]["S3Uri"] == "s3://bucket/runs/checkpoints/diloco-run-1-00001"
    assert "--attempts" in job["AlgorithmSpecification"]["ContainerArguments"]


def test_an_overlay_is_merged_and_breaks_nothing(offline):
    overlay = {"ResourceConfig": {"VolumeSizeInGB": 7, "KeepAlivePeriodInSeconds": 60}}
    job = plan(offline(request_overlay=overlay))[0]
    assert job["ResourceConfig"]["VolumeSizeInGB"] == 7
    assert job["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 60
    assert job["ResourceConfig"]["InstanceCount"] == 1
    for bad in (
        {"TrainingJobName": "x"},
        {"EnableNetworkIsolation": True},
        {"ResourceConfig": None},
        {"AlgorithmSpecification": {"TrainingImage": "other"}},
        {"RetryStrategy": {"MaximumRetryAttempts": 3}},
        {"ResourceConfig": {"InstanceType": "ml.g5.xlarge"}},
        {"HyperParameters": {"lr": "x"}},
        {"Environment": None},
        {"Tags": [{"Key": "team", "Value": "x"}]},
    ):
        with pytest.raises(InvalidRequestError, match="may not set"):
            plan(offline(request_overlay=bad))
    assert job["EnableNetworkIsolation"] is False


def test_instance_types_that_are_preferred_take_the_place_of_the_one(offline):
    preferred = [{"InstanceType": kind} for kind in ("ml.g5.xlarge", "ml.g6.xlarge")]
    job = plan(offline(request_overlay={"ResourceConfig": {"InstancePreferences": preferred}}))[0]
    assert job["ResourceConfig"]["InstancePreferences"] == [
        {**item, "InstanceCount": 1} for item in preferred
    ]
    assert not {"InstanceType", "InstanceCount"} & job["ResourceConfig"].keys()


def test_an_overlay_that_changes_later_changes_nothing(offline):
    overlay = {"OutputDataConfig": {"KmsKeyId": "one"}}
    executor = offline(request_overlay=overlay)
    before = plan(executor)
    overlay["OutputDataConfig"]["KmsKeyId"] = "two"
    assert plan(executor) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gpu": "L4", "volume_size_gb": 100}, r"volume_size_gb has no effect on ml\.g6\.xlarge"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(offline, options, text):
    gpu = options.pop("gpu", None)
    with pytest.raises(InvalidRequestError, match=text):
        plan(offline(**options), gpu=gpu)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "option",
    [
        {"image_uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:2"},
        {"role_arn": "arn:aws:iam::123456789012:role/other"},
        {"output_s3_path": "s3://bucket/other"},
        {"cpu_instance_type": "ml.m5.2xlarge"},
        {"volume_size_gb": 7},
        {"command": ["python3", "-m", "diloco_protocol.runner"]},
        {"tags": {"team": "x"}},
        {"spot": True},
        {"platform_retries": 2},
        {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]},
        {"request_overlay": {"OutputDataConfig": {"KmsKeyId": "key"}}},
        {"grace": 20.0},
        {"max_restarts": 1},
        {"env": {"A": "1"}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_launches_that_differ_in_an_option_have_other_fingerprints(offline, option):
    def fingerprint(**options):
        return plan(offline(**options))[0]["HyperParameters"]["DILOCO_FINGERPRINT"]

    assert fingerprint(**option) != fingerprint()


def test_fingerprints_that_mean_nothing_else_are_equal(offline):
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    first = plan(offline(tags=one, env=one), args=one, labels=other)
    second = plan(offline(tags=other, env=other), args=other, labels=one)
    prints = {job["HyperParameters"]["DILOCO_FINGERPRINT"] for job in [*first, *second]}
    assert len(prints) == 1
    spot = {"spot": True, "checkpoint_s3_path": "s3://bucket/one"}
    elsewhere = {**spot, "checkpoint_s3_path": "s3://bucket/two"}
    (here, *_), (there, *_) = plan(offline(**spot)), plan(offline(**elsewhere))
    assert (
        here["HyperParameters"]["DILOCO_FINGERPRINT"]
        != there["HyperParameters"]["DILOCO_FINGERPRINT"]
    )


def test_a_plan_has_no_secrets(offline):
    text = json.dumps(plan(offline(), env={"API_TOKEN": "hunter2", "MODE": "fast"}))
    assert "fast" in text
    assert "hunter2" not in text.replace("\\", "")


def test_variables_that_the_environment_does_not_take_travel_with_the_spec(offline):
    variables = {f"V{number}": str(number) for number in range(101)} | {
        "LONG": "x" * 513,
        "N" * 513: "1",
    }
    job = plan(offline(), env=variables)[0]
    there = variables_from_strings(job["HyperParameters"])
    assert {**job["Environment"], **there} == variables
    assert len(job["Environment"]) == 100
    assert {"LONG", "N" * 513} <= there.keys()


def test_long_secrets_are_in_no_plan(offline):
    job = plan(offline(), env={"API_TOKEN": "t0ken" * 200})[0]
    assert variables_from_strings(job["HyperParameters"]) == {"API_TOKEN": REDACTED}


def test_variables_that_are_too_long_together_are_refused(offline):
    with pytest.raises(InvalidRequestError, match="room for about"):
        plan(offline(), env={"ONE": "x" * 125_000, "TWO": "x" * 125_000})


def test_every_attempt_after_an_internal_error_has_the_whole_timeout(offline):
    once = plan(offline(), timeout=1000)[0]
    again = plan(offline(platform_retries=3), timeout=1000)[0]
    assert again["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    most = [each["StoppingCondition"]["MaxRuntimeInSeconds"] for each in (once, again)]
    assert most[1] == 4 * most[0]
    longest = plan(offline(platform_retries=30), timeout=20 * 86_400)[0]
    assert longest["StoppingCondition"] == {"MaxRuntimeInSeconds": 28 * 86_400}


def test_attempts_are_counted_where_sagemaker_starts_a_job_again(offline):
    for options, counted in (({}, False), ({"platform_retries": 1}, True), ({"spot": True}, True)):
        job = plan(offline(**options))[0]
        arguments = job["AlgorithmSpecification"]["ContainerArguments"]
        assert ("--attempts" in arguments) is counted
        assert ("CheckpointConfig" in job) is counted


def test_a_job_keeps_room_for_the_tag_of_a_cancel(offline):
    """The service allows 50."""
    labels = {f"key-{number}": "value" for number in range(46)}
    (job,) = offline().plan(1, "trainer:train", labels=labels).requests
    assert len(job["Tags"]) == 49
    with pytest.raises(InvalidRequestError, match=r"50 tags .* at most 49"):
        offline(tags={"owner": "me"}).plan(1, "trainer:train", labels=labels)
