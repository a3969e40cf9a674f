"""The life of a training job, as boto3 sees it."""

from __future__ import annotations

import pytest


def test_from_create_to_completed(lab):
    job = lab.create(
        "run-1",
        HyperParameters={"a": "1"},
        Environment={"B": "2"},
        Tags=[{"Key": "k", "Value": "v"}],
    )
    first = lab.describe("run-1")
    assert (first["TrainingJobStatus"], first["SecondaryStatus"]) == ("InProgress", "Starting")
    assert (first["HyperParameters"], first["Environment"]) == ({"a": "1"}, {"B": "2"})
    assert "Tags" not in first
    lab.world.advance(30)
    job.start()
    lab.world.advance(60)
    job.succeed()
    assert lab.describe("run-1")["SecondaryStatus"] == "Uploading"
    lab.world.settle()
    last = lab.describe("run-1")
    assert (last["TrainingJobStatus"], last["SecondaryStatus"]) == ("Completed", "Completed")
    assert (last["TrainingStartTime"] - last["CreationTime"]).total_seconds() == 30
    assert (last["TrainingEndTime"] - last["TrainingStartTime"]).total_seconds() == 61
    assert last["BillableTimeInSeconds"] == 60
    assert last["ModelArtifacts"] == {"S3ModelArtifacts": "s3://bucket/out/run-1/output/model/"}
    assert lab.history("run-1") == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert all("EndTime" in entry for entry in last["SecondaryStatusTransitions"])


def test_a_program_that_fails(lab):
    job = lab.create()
    job.start()
    job.fail(3, "no more data")
    lab.world.settle()
    told = lab.describe()
    assert told["TrainingJobStatus"] == "Failed"
    assert told["FailureReason"] == "AlgorithmError: no more data, exit code: 3"


def test_a_failure_reason_holds_1024_characters_with_the_words_of_aws(lab):
    job = lab.create()
    job.start()
    job.fail(1, "x" * 5000)
    lab.world.settle()
    reason = lab.describe()["FailureReason"]
    assert 1000 < len(reason) <= 1024
    assert reason.endswith("x, exit code: 1")


def test_auto_start(lab):
    lab.world.habits.auto_start = 1.0
    lab.create()
    lab.world.settle()
    assert lab.describe()["SecondaryStatus"] == "Training"


def test_stop(lab):
    job = lab.create()
    job.start()
    lab.api.stop_training_job(TrainingJobName="job")
    assert job.status == ("Stopping", "Stopping")
    with lab.refused(
        "ValidationException", "rejected because the training job is in status Stopping"
    ):
        lab.api.stop_training_job(TrainingJobName="job")
    lab.world.settle()
    assert job.status == ("Stopped", "Stopped")
    with lab.refused(
        "ValidationException", "rejected because the training job is in status Stopped"
    ):
        lab.api.stop_training_job(TrainingJobName="job")


def test_a_program_that_ignores_sigterm_is_killed_after_two_minutes(lab):
    job = lab.create()
    job.start()
    job.ignore_term()
    lab.api.stop_training_job(TrainingJobName="job")
    lab.world.advance(119)
    assert job.status[0] == "Stopping"
    lab.world.advance(1)
    assert job.status[0] == "Stopped"


def test_a_stop_comes_before_an_end_that_was_under_way(lab):
    job = lab.create()
    job.start()
    job.succeed()
    job.stop()
    lab.world.settle()
    assert job.status == ("Stopped", "Stopped")


@pytest.mark.parametrize("call", ["describe", "stop", "delete"])
def test_what_does_not_exist(lab, call):
    with lab.refused("ValidationException", "^Requested resource not found.$"):
        getattr(lab.api, f"{call}_training_job")(TrainingJobName="none")


def test_a_name_is_free_only_after_the_delete(lab):
    job = lab.create()
    with lab.refused(
        "ResourceInUse",
        r"must be unique within an AWS account and region.*\(arn:.*training-job/job\)",
    ):
        lab.create()
    with lab.refused("ResourceInUse", "while it is in status InProgress"):
        lab.api.delete_training_job(TrainingJobName="job")
    job.stop()
    lab.world.settle()
    lab.api.delete_training_job(TrainingJobName="job")
    lab.world.advance(1)
    lab.create()
    assert lab.describe()["TrainingJobStatus"] == "InProgress"


def test_a_delete_may_take_a_while(lab):
    lab.create().stop()
    lab.world.settle()
    lab.world.habits.delete_seconds = 5.0
    lab.api.delete_training_job(TrainingJobName="job")
    assert lab.describe()["TrainingJobStatus"] == "Deleting"
    with lab.refused("ResourceInUse", "must be unique"):
        lab.create()
    lab.world.advance(5)
    assert lab.listed() == []


def test_a_warm_pool_keeps_a_job_from_its_delete(lab):
    resources = {**lab.request()["ResourceConfig"], "KeepAlivePeriodInSeconds": 600}
    job = lab.create(ResourceConfig=resources)
    job.start()
    job.succeed()
    lab.world.settle()
    assert lab.describe()["WarmPoolStatus"]["Status"] == "Available"
    assert lab.listed(WarmPoolStatusEquals="Available") == ["job"]
    with lab.refused("ResourceInUse", "warm pool"):
        lab.api.delete_training_job(TrainingJobName="job")
    lab.world.advance(600)
    assert lab.describe()["WarmPoolStatus"]["Status"] == "Terminated"
    lab.api.delete_training_job(TrainingJobName="job")


def test_a_warm_pool_is_taken_by_the_next_job_of_its_kind(lab):
    resources = {**lab.request()["ResourceConfig"], "KeepAlivePeriodInSeconds": 600}
    job = lab.create(ResourceConfig=resources)
    assert lab.describe()["WarmPoolStatus"] == {"Status": "InUse"}
    job.start()
    job.succeed()
    lab.world.settle()
    lab.create("larger", ResourceConfig={**resources, "VolumeSizeInGB": 77})
    lab.create("other-role", RoleArn="arn:aws:iam::123456789012:role/another")
    assert lab.describe()["WarmPoolStatus"]["Status"] == "Available"
    lab.world.advance(100)
    heir = lab.create("heir", ResourceConfig=resources)
    assert lab.describe()["WarmPoolStatus"] == {
        "Status": "Reused",
        "ResourceRetainedBillableTimeInSeconds": 100,
        "ReusedByJob": "heir",
    }
    assert lab.describe("heir")["WarmPoolStatus"] == {"Status": "InUse"}
    lab.api.delete_training_job(TrainingJobName="job")
    heir.start()
    heir.fail()
    lab.world.settle()
    assert lab.describe("heir")["WarmPoolStatus"]["Status"] == "Terminated"


def test_a_pool_that_was_taken_does_not_end_later(lab):
    resources = {**lab.request()["ResourceConfig"], "KeepAlivePeriodInSeconds": 600}
    job = lab.create(ResourceConfig=resources)
    job.start()
    job.succeed()
    lab.world.settle()
    lab.create("heir")
    lab.world.advance(600)
    assert lab.describe()["WarmPoolStatus"]["Status"] == "Reused"


def test_max_runtime(lab):
    job = lab.create()
    job.start()
    lab.world.advance(3599)
    assert job.status == ("InProgress", "Training")
    lab.world.advance(2)
    assert job.status == ("Stopped", "MaxRuntimeExceeded")


def test_max_pending(lab):
    limits = {"MaxRuntimeInSeconds": 60, "MaxPendingTimeInSeconds": 7200}
    waits, runs = (lab.create(name, StoppingCondition=limits) for name in ("waits", "runs"))
    lab.world.advance(7190)
    runs.start()
    lab.world.advance(10)
    assert (waits.status[0], runs.status[0]) == ("Stopped", "InProgress")


def test_spot_is_interrupted_and_starts_again(lab):
    job = lab.spot()
    job.start()
    lab.world.advance(100)
    job.interrupt()
    assert job.status == ("InProgress", "Interrupted")
    lab.world.advance(300)
    job.start()
    lab.world.advance(50)
    job.succeed()
    lab.world.settle()
    assert lab.history() == [
        *("Starting", "Downloading", "Training", "Interrupted"),
        *("Starting", "Downloading", "Training", "Uploading", "Completed"),
    ]
    assert lab.describe()["BillableTimeInSeconds"] == 150


def test_max_wait(lab):
    job = lab.spot(wait=4000)
    lab.world.advance(4000)
    assert job.status == ("Stopped", "MaxWaitTimeExceeded")


def test_only_spot_is_interrupted(lab):
    with pytest.raises(ValueError, match="job does not run on spot"):
        lab.create().interrupt()


def test_an_internal_error_and_a_restart(lab):
    job = lab.create(RetryStrategy={"MaximumRetryAttempts": 2})
    job.start()
    for _ in range(2):
        job.start()
        job.break_down()
        assert job.status == ("InProgress", "Restarting")
    job.start()
    job.break_down()
    lab.world.settle()
    assert lab.history().count("Restarting") == 2
    assert lab.describe()["FailureReason"].startswith("InternalServerError: ")


def test_only_an_internal_error_is_tried_again(lab):
    for name, end in (("program", "fail"), ("capacity", "capacity_error"), ("other", "break_down")):
        job = lab.create(name, RetryStrategy={"MaximumRetryAttempts": 30})
        job.start()
        getattr(job, end)(*(["ClientError: no such image"] if name == "other" else []))
        lab.world.settle()
        assert lab.describe(name)["TrainingJobStatus"] == "Failed"


def test_no_capacity(lab):
    lab.world.habits.no_capacity.add("ml.m5.large")
    lab.world.habits.auto_start = 1.0
    lab.create()
    lab.spot("spot")
    lab.world.settle()
    assert lab.describe()["FailureReason"].startswith(
        "CapacityError: Unable to provision requested ML compute"
    )
    assert lab.describe("spot")["SecondaryStatus"] == "Starting"


def test_the_quota_is_free_only_some_time_after_the_end(lab):
    lab.world.habits.quotas["ml.m5.large"] = 1
    job = lab.create("one")
    text = (
        "The account-level service limit 'ml.m5.large for training job usage' is 1 Instances, with "
        "current utilization of 1 Instances and a request delta of 1 Instances."
    )
    with lab.refused("ResourceLimitExceeded", text):
        lab.create("two")
    job.stop()
    lab.world.settle()
    assert job.status[0] == "Stopped"
    with lab.refused("ResourceLimitExceeded", text):
        lab.create("two")
    lab.world.advance(120)
    lab.create("two")


def test_a_role_that_may_not_be_passed(lab):
    lab.world.habits.refused_roles.add(lab.request()["RoleArn"])
    with lab.refused(
        "AccessDeniedException",
        "not authorized to perform: iam:PassRole on resource: .*role/training",
    ):
        lab.create()
    assert lab.world.jobs() == []


def test_a_job_that_is_not_there(lab):
    lab.create("there")
    with pytest.raises(LookupError, match="no training job 'none'; there are: there"):
        lab.world.job("none")
