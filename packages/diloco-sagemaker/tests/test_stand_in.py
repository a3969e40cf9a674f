"""The executor against diloco-localcloud's stand-in, which checks requests and answers itself."""

import logging

import boto3
import pytest

from diloco_localcloud import SageMakerStandIn
from diloco_protocol import (
    BackendError,
    Backoff,
    Outcome,
    QuotaExceededError,
    Reason,
    outcome_to_message,
)
from diloco_sagemaker import SageMakerExecutor

OPTIONS = {
    "role_arn": "arn:aws:iam::123456789012:role/trainer",
    "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
    "output_s3_path": "s3://bucket/runs",
}


class Bench:
    def __init__(self, stand_in):
        self.stand_in, self.world = stand_in, stand_in.world
        self.made = []

    def session(self):
        known = self.stand_in.client_options
        return boto3.Session(
            known["aws_access_key_id"],
            known["aws_secret_access_key"],
            region_name=known["region_name"],
        )

    def executor(self, **options):
        backoff = Backoff(
            first=1.0, factor=1.5, cap=20.0, clock=self.world.now, sleep=self.world.advance
        )
        self.made.append(
            SageMakerExecutor(
                **{
                    **OPTIONS,
                    "session": self.session(),
                    "endpoint_url": self.stand_in.url,
                    "backoff": backoff,
                    **options,
                }
            )
        )
        return self.made[-1]

    def launch(self, n=2, **options):
        return self.executor(**options).launch_replicas(n, "trainer:train", run_id="run-1")

    def job(self, handle):
        return self.world.job(handle.metadata["job_name"])


@pytest.fixture
def bench():
    with SageMakerStandIn() as stand_in:
        made = Bench(stand_in)
        yield made
        for executor in made.made:
            executor.close()


def test_from_a_launch_to_results(bench):
    handles = bench.launch()
    s3 = boto3.client("s3", **bench.stand_in.client_options)
    s3.create_bucket(Bucket="bucket")
    for handle in handles:
        bench.job(handle).start()
        bench.job(handle).log(f"rank {handle.rank} works\n")
    assert {bench.executor().poll(handle).value for handle in handles} == {"running"}
    for handle in handles:
        key = f"runs/{handle.metadata['job_name']}/output/model/diloco-outcome.json"
        content = Outcome(0, result=handle.rank).to_json().encode()
        s3.put_object(Bucket="bucket", Key=key, Body=content)
        bench.job(handle).succeed()
    results = bench.executor().collect(handles, timeout=600)
    assert [(each["status"], each["result"]) for each in results] == [
        ("succeeded", 0),
        ("succeeded", 1),
    ]
    assert bench.executor().stream_logs(handles[1]) == "rank 1 works"
    bench.executor().purge(handles[0])
    assert bench.world.jobs() == []


def test_a_failure_with_the_words_of_the_runner(bench):
    (handle,) = bench.launch(1)
    bench.job(handle).start()
    text, _ = outcome_to_message(Outcome(143, error="the timeout passed", reason=Reason.TIMEOUT))
    bench.job(handle).fail(143, text)
    bench.world.settle()
    found = bench.executor().describe(handle)
    assert (found.state.value, found.reason, found.exit_code) == ("failed", Reason.TIMEOUT, 143)
    assert found.message == "the timeout passed"


def test_a_cancel_ends_one_replica(bench):
    handles = bench.launch()
    for handle in handles:
        bench.job(handle).start()
    bench.executor().cancel(handles[0])
    assert bench.executor().describe(handles[0]).stopping
    bench.world.settle()
    for _ in range(2):
        bench.executor().cancel(handles[0])
        found = bench.executor().describe(handles[0])
        assert (found.state.value, found.reason) == ("cancelled", Reason.CANCEL_REQUESTED)
    assert bench.executor().poll(handles[1]).value == "running"


def test_an_interruption_on_spot_is_an_attempt(bench):
    (handle,) = bench.launch(1, spot=True)
    bench.job(handle).start()
    bench.job(handle).interrupt()
    found = bench.executor().describe(handle)
    assert (found.state.value, found.reason, found.attempt) == ("pending", Reason.PREEMPTED, 2)
    bench.job(handle).start()
    found = bench.executor().describe(handle)
    assert (found.state.value, found.attempt) == ("running", 2)


def test_a_purge_leaves_nothing_for_a_later_run_of_the_name(bench):
    """Checkpoints go with the run; those of others stay."""
    s3 = boto3.client("s3", **bench.stand_in.client_options)
    s3.create_bucket(Bucket="bucket")
    executor = bench.executor(checkpoint_s3_path="s3://bucket/kept")
    handles = executor.launch_replicas(1, "trainer:train", run_id="run-1", spot=True)
    name = handles[0].metadata["job_name"]
    for number in range(3):
        s3.put_object(Bucket="bucket", Key=f"kept/{name}/{number}", Body=b"")
    s3.put_object(Bucket="bucket", Key=f"kept/{name}0/x", Body=b"")
    bench.job(handles[0]).start()
    bench.job(handles[0]).succeed()
    bench.world.settle()
    executor.purge(handles[0])
    left = s3.list_objects_v2(Bucket="bucket")["Contents"]
    assert [each["Key"] for each in left] == [f"kept/{name}0/x"]


def test_a_failed_launch_leaves_nothing_for_the_next_launch_of_the_name(bench):
    """A job of it may have trained for a while; what it kept would go on counting attempts."""
    s3 = boto3.client("s3", **bench.stand_in.client_options)
    s3.create_bucket(Bucket="bucket")
    for key in ("diloco-run-1-00000/.diloco-attempts.json", "diloco-run-1-00002/x", "others/x"):
        s3.put_object(Bucket="bucket", Key=f"kept/{key}", Body=b"")
    bench.world.habits.quotas = {"ml.m5.xlarge": 1}
    with pytest.raises(QuotaExceededError):
        bench.launch(spot=True, checkpoint_s3_path="s3://bucket/kept", instance_type="ml.m5.xlarge")
    left = s3.list_objects_v2(Bucket="bucket")["Contents"]
    assert [each["Key"] for each in left] == ["kept/diloco-run-1-00002/x", "kept/others/x"]


def test_all_pages_of_a_list_of_objects_are_read(bench):
    class Paged:
        """Answers as S3 does, a key at a time."""

        def list_objects_v2(self, Bucket, Prefix, ContinuationToken="0"):
            number = int(ContinuationToken)
            more = {"NextContinuationToken": str(number + 1)} if number < 2 else {}
            return {"Contents": [{"Key": f"{Prefix}{number}"}], **more}

        def close(self):
            pass

    client = bench.executor()._client
    client._clients["s3"] = Paged()
    assert list(client.object_keys("bucket", "a/")) == [["a/0"], ["a/1"], ["a/2"]]


def test_a_purge_deletes_no_folder_that_is_not_named_after_the_job(bench):
    """Any creator of training jobs can use our names, and any place for its checkpoints."""
    s3 = boto3.client("s3", **bench.stand_in.client_options)
    s3.create_bucket(Bucket="bucket")
    s3.put_object(Bucket="bucket", Key="precious/x", Body=b"")
    executor = bench.executor()
    (request,) = executor.plan(1, "trainer:train", run_id="run-1", spot=True).requests
    request["CheckpointConfig"]["S3Uri"] = "s3://bucket/precious"
    boto3.client("sagemaker", **bench.stand_in.client_options).create_training_job(**request)
    (handle,) = executor.attach("run-1")
    bench.job(handle).stop()
    bench.world.settle()
    executor.purge(handle)
    assert [each["Key"] for each in s3.list_objects_v2(Bucket="bucket")["Contents"]] == [
        "precious/x"
    ]


@pytest.mark.parametrize("place", ["s3://prod/models", "s3://bucket/runs/checkpoints/x"])
def test_a_purge_deletes_only_where_the_executor_keeps_things(bench, place, caplog):
    """A forged job may name any place, with a folder that is called as the job is."""
    s3 = boto3.client("s3", **bench.stand_in.client_options)
    for bucket in ("bucket", "prod"):
        s3.create_bucket(Bucket=bucket)
    executor = bench.executor()
    (request,) = executor.plan(1, "trainer:train", run_id="run-1", spot=True).requests
    name = request["TrainingJobName"]
    request["CheckpointConfig"]["S3Uri"] = f"{place}/{name}"
    request["OutputDataConfig"]["S3OutputPath"] = place
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    keys = [f"{prefix}/{name}/{end}" for end in ("a/b", "output/model/diloco-outcome.json")]
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=b"precious")
    boto3.client("sagemaker", **bench.stand_in.client_options).create_training_job(**request)
    (handle,) = executor.attach("run-1")
    bench.job(handle).stop()
    bench.world.settle()
    with caplog.at_level(logging.WARNING, "diloco_sagemaker"):
        executor.purge(handle)
    assert [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]] == keys
    warned = [record.getMessage() for record in caplog.records]
    assert [f"{option}= of this executor" in text and place in text for option, text in zip(
        ("output_s3_path", "checkpoint_s3_path"), warned, strict=True
    )] == [True, True]  # fmt: skip
    assert executor.list_runs() == []


def test_a_job_that_ran_for_too_long_has_failed(bench):
    (handle,) = bench.launch(1)
    bench.job(handle).start()
    bench.world.advance(100_000)
    found = bench.executor().describe(handle)
    assert (found.state.value, found.reason) == ("failed", Reason.TIMEOUT)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("by", "state", "reason"),
    [
        ("deadline", "failed", Reason.TIMEOUT),
        ("console", "cancelled", Reason.STOPPED_EXTERNALLY),
        ("cancel", "cancelled", Reason.CANCEL_REQUESTED),
    ],
)
def test_a_job_that_waited_for_too_long_has_failed(bench, by, state, reason):
    executor = bench.executor(pending_timeout=1800)
    (handle,) = executor.launch_replicas(1, "trainer:train", run_id="run-1", gpu="L4")
    bench.job(handle).wait_for_capacity()
    if by == "deadline":
        bench.world.advance(1801)
    elif by == "cancel":
        executor.cancel(handle)
    else:
        bench.job(handle).stop()
    bench.world.settle()
    found = bench.executor().describe(handle)
    assert (found.state.value, found.reason) == (state, reason)


def test_no_capacity(bench):
    (handle,) = bench.launch(1)
    bench.job(handle).capacity_error()
    bench.world.settle()
    found = bench.executor().describe(handle)
    assert (found.state.value, found.reason) == ("failed", Reason.PLATFORM)


@pytest.mark.sampled
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_lost_answer_creates_nothing_twice(bench, after):
    bench.stand_in.faults.add(
        "ambiguous", verb="CreateTrainingJob", resource="sagemaker", times=1, after=after
    )
    handles = bench.launch(3)
    assert sorted(job.name for job in bench.world.jobs()) == [
        handle.metadata["job_name"] for handle in handles
    ]
    assert bench.launch(3) == handles


def test_an_internal_error_of_sagemaker_begins_the_next_attempt(bench):
    handles = bench.launch(platform_retries=1)
    job, executor = bench.job(handles[0]), bench.executor()
    job.start()
    assert executor.describe(handles[0]).attempt == 1
    job.break_down()
    found = executor.describe(handles[0])
    assert (found.state.value, found.reason, found.attempt) == ("pending", Reason.PREEMPTED, 2)
    job.start()
    assert executor.poll(handles[0]).value == "running"
    job.break_down()
    bench.world.settle()
    found = executor.describe(handles[0])
    assert (found.state.value, found.reason, found.attempt) == ("failed", Reason.PLATFORM, 2)


def test_the_instances_of_an_ended_run_are_taken_by_the_next(bench):
    warm = {"request_overlay": {"ResourceConfig": {"KeepAlivePeriodInSeconds": 600}}}
    (first,) = bench.launch(1, **warm)
    job, executor = bench.job(first), bench.executor()
    job.start()
    job.succeed()
    bench.world.settle()
    with pytest.raises(BackendError, match=r"kept warm\. Purge again then"):
        executor.purge(first)
    bench.executor(**warm).launch_replicas(1, "trainer:train", run_id="run-2")
    assert job.json["WarmPoolStatus"]["Status"] == "Reused"
    executor.purge(first)
    assert executor.list_runs() == ["run-2"]
