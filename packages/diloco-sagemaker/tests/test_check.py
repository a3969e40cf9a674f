"""What stands in the way of a launch."""

import pytest
from scripted_aws import AWSHarness

from diloco_protocol import InvalidRequestError, Outcome, QuotaExceededError
from diloco_sagemaker._verbs._check import _policy_source

ROLE = "arn:aws:iam::123456789012:role/trainer"
PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan"


@pytest.fixture
def world():
    harness = AWSHarness()
    try:
        yield harness
    finally:
        harness.close()


def found(findings):
    return {finding.subject: finding.ok for finding in findings}


def told(findings, subject):
    return next(finding.message for finding in findings if finding.subject == subject)


def test_all_is_well(world):
    world.world.habits.quotas = {"ml.g6.xlarge": 2}
    findings = world.make_executor().check(2, gpu="L4")
    assert found(findings) == dict.fromkeys(
        ("credentials", "training jobs", "pass role", "quota", "image", "bucket"), True
    )
    assert world.world.jobs() == []


def test_what_cannot_be_found_out_is_not_well(world):
    for operation in (
        "SimulatePrincipalPolicy",
        "ListServiceQuotas",
        "DescribeImages",
        "ListObjects",
    ):
        world.stand_in.faults.add("forbidden", verb=operation, times=None)
    findings = world.make_executor().check()
    assert found(findings) == {
        "credentials": True, "training jobs": True, "pass role": None, "quota": None, "image": None,
        "bucket": None,
    }  # fmt: skip
    assert "not known" in told(findings, "pass role")


def test_what_is_missing(world):
    habits = world.world.habits
    habits.refused_roles = {ROLE}
    habits.quotas = {"ml.m5.xlarge": 1}
    habits.missing_images = {"trainer:1"}
    findings = world.make_executor(output_s3_path="s3://nobodys/runs").check(2)
    assert found(findings) == {
        "credentials": True, "training jobs": True, "pass role": False, "quota": False,
        "image": False, "bucket": False,
    }  # fmt: skip
    assert "launcher_policy.json" in told(findings, "pass role")
    assert "is 1, and the launch needs 2" in told(findings, "quota")
    assert "no bucket 'nobodys'" in told(findings, "bucket")


def test_a_role_without_rights_may_have_them_from_the_bucket(world):
    world.world.habits.roles_without_rights = {ROLE}
    findings = world.make_executor().check()
    assert found(findings)["bucket"] is None
    assert "one of the bucket's may" in told(findings, "bucket")


def test_a_bucket_in_another_region_is_told(world):
    world.s3.create_bucket(
        Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "ap-south-1"}
    )
    findings = world.make_executor(output_s3_path="s3://far-away/runs").check()
    told = [(each.ok, each.message) for each in findings if each.subject == "bucket"]
    assert [ok for ok, _ in told] == [None, True]
    assert "far-away is in ap-south-1, and the jobs are in" in told[0][1]


@pytest.mark.parametrize(
    "image", ["trainer:1", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:1"]
)
def test_an_image_elsewhere_is_not_looked_at(world, image):
    assert found(world.make_executor(image_uri=image).check())["image"] is None


def test_quotas_are_those_of_spot_where_spot_is_asked_for(world):
    world.world.habits.quotas = {f"ml.c5.{number}xlarge": 1 for number in range(150)}
    world.world.habits.quotas["ml.m5.xlarge"] = 5
    findings = world.make_executor(spot=True).check()
    assert "spot training job usage is 5" in told(findings, "quota")


def test_no_credentials_is_one_finding(world):
    world.stand_in.faults.add("unauthorized", verb="GetCallerIdentity", times=None)
    (finding,) = world.make_executor().check()
    assert (finding.subject, finding.ok) == ("credentials", False)


def test_jobs_that_may_not_be_listed_stand_in_the_way(world):
    world.stand_in.faults.add("forbidden", verb="ListTrainingJobs", times=None)
    assert found(world.make_executor().check())["training jobs"] is False


def test_what_a_launch_would_refuse_is_refused(world):
    with pytest.raises(InvalidRequestError, match="known are"):
        world.make_executor().check(gpu="GB9000")


@pytest.mark.parametrize(
    ("exclusive", "words"),
    [(True, "conditional writes included"), (False, "only runs with fixed membership")],
)
def test_a_job_tries_the_rendezvous_and_is_removed(world, exclusive, words):
    world.world.habits.auto_start = 1.0
    sleep, seen = world.sleep, []

    def play(seconds):
        for job in world.world.jobs():
            if job.status == ("InProgress", "Training"):
                seen.append(job.json["ResourceConfig"]["InstanceType"])
                result = {"exclusive": exclusive, "seconds": 0.5}
                key = f"runs/{job.name}/output/model/diloco-outcome.json"
                content = Outcome(0, result=result).to_json().encode()
                world.s3.put_object(Bucket="bucket", Key=key, Body=content)
                job.succeed()
        sleep(seconds)

    world.sleep = play
    findings = world.make_executor().check(2, gpu="H100", rendezvous_uri="s3://bucket/run-1")
    assert (found(findings)["rendezvous"], seen) == (True, ["ml.m5.xlarge"])
    assert words in told(findings, "rendezvous")
    assert world.world.jobs() == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"pending_timeout": 3600},
        {"platform_retries": 3},
        {"max_restarts": 6},
        {
            "spot": True,
            "request_overlay": {
                "ResourceConfig": {"VolumeSizeInGB": None, "InstancePlacementConfig": {}},
                "StoppingCondition": {"MaxWaitTimeInSeconds": 200_000},
            },
        },
        {
            "request_overlay": {
                "ResourceConfig": {"KeepAlivePeriodInSeconds": 600, "TrainingPlanArn": f"{PLAN}/p"},
                "StoppingCondition": {"MaxPendingTimeInSeconds": 7200},
                "InputDataConfig": [
                    {
                        "ChannelName": "train",
                        "DataSource": {
                            "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data"}
                        },
                    }
                ],
            }
        },
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_job_that_tries_the_rendezvous_is_small_whatever_replicas_have(world, options):
    world.make_executor(**options).plan(1, "trainer:train", gpu="L4")  # replicas have it
    seen, sleep = [], world.sleep

    def look(seconds):
        seen.extend(job.json for job in world.world.jobs())
        sleep(seconds)

    world.sleep = look
    findings = world.make_executor(**options).check(
        gpu="L4", rendezvous_uri="s3://bucket/run-1", patience=60.0
    )
    assert "still pending" in told(findings, "rendezvous")
    small = {"InstanceCount": 1, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 100}
    assert seen[0]["ResourceConfig"] == small
    assert seen[0]["StoppingCondition"] == {"MaxRuntimeInSeconds": 1870}
    assert not seen[0].keys() & {"RetryStrategy", "CheckpointConfig", "InputDataConfig"}
    assert world.world.jobs() == []


def test_a_job_that_cannot_use_the_rendezvous(world):
    world.world.habits.auto_start = 1.0
    sleep = world.sleep

    def play(seconds):
        for job in world.world.jobs():
            if job.status == ("InProgress", "Training"):
                job.fail(1, "access denied")
        sleep(seconds)

    world.sleep = play
    findings = world.make_executor().check(rendezvous_uri="s3://bucket/run-1")
    assert found(findings)["rendezvous"] is False
    assert "access denied" in told(findings, "rendezvous")


def test_a_job_that_does_not_come_is_not_known_and_removed(world):
    uri = "s3://key:hidden@bucket/run-1"
    findings = world.make_executor().check(rendezvous_uri=uri, patience=60.0)
    assert found(findings)["rendezvous"] is None
    assert "s3://<redacted>@bucket/run-1" in told(findings, "rendezvous")
    assert world.world.jobs() == []


@pytest.mark.sampled
@pytest.mark.parametrize(("quota_timeout", "seconds"), [(0.0, 0.0), (30.0, 30.0), (86400.0, 60.0)])
def test_the_job_that_tries_the_rendezvous_waits_for_quota_as_long_as_it_may_take(
    world, quota_timeout, seconds
):
    executor, begun, tries = world.make_executor(quota_timeout=quota_timeout), world.clock(), []

    def create(request):
        tries.append(world.clock() - begun)
        raise QuotaExceededError("limit")

    executor._client.create = create
    findings = executor.check(rendezvous_uri="s3://bucket/run-1", patience=60.0)
    assert "could not be launched: limit" in told(findings, "rendezvous")
    assert seconds <= tries[-1] < seconds + 25.0  # the longest pause


def test_a_patience_that_is_none_is_refused(world):
    with pytest.raises(InvalidRequestError, match="patience"):
        world.make_executor().check(rendezvous_uri="s3://bucket/run-1", patience="1")


def test_a_job_that_could_not_be_removed_is_named(world):
    world.stand_in.faults.add("forbidden", verb="StopTrainingJob", resource="sagemaker", times=9)
    findings = world.make_executor().check(rendezvous_uri="s3://bucket/run-1", patience=60.0)
    (run,) = world.make_executor().list_runs()
    assert found(findings)["cleanup"] is False
    assert f"may cost money: end it with cancel_run({run!r})" in told(findings, "cleanup")


def test_the_policies_of_a_session_are_those_of_its_role():
    session = "arn:aws:sts::123456789012:assumed-role/launcher/me"
    assert _policy_source(session) == "arn:aws:iam::123456789012:role/launcher"
    user = "arn:aws:iam::123456789012:user/me"
    assert _policy_source(user) == user
