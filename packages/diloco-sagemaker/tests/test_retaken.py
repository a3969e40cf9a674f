"""Names that go to another launch while one is at work."""

import pytest
from scripted_aws import OnDemandHarness

from diloco_protocol import (
    BackendError,
    Backoff,
    ForbiddenError,
    LaunchError,
    RunConflictError,
)

FIRST, SECOND = "diloco-run-1-00000", "diloco-run-1-00001"


@pytest.fixture
def harness():
    made = OnDemandHarness()
    yield made
    made.close()


def launch(executor, n, **options):
    return executor.launch_replicas(n, "trainer:train", run_id="run-1", **options)


def end(harness, name):
    """Somebody ends and deletes a job."""
    harness.api.stop_training_job(TrainingJobName=name)
    harness.world.settle(within=300)
    harness.api.delete_training_job(TrainingJobName=name)


@pytest.mark.sampled
@pytest.mark.parametrize("list_lag", [0.0, 1e6])
@pytest.mark.parametrize("same", [True, False])
def test_a_job_whose_name_another_launch_has_taken_is_not_returned(harness, list_lag, same):
    """The first launch waits for quota meanwhile; the other one is smaller, or the same again."""
    harness.world.habits.quotas["ml.m5.xlarge"] = 1
    harness.world.habits.list_lag = harness.world.habits.search_lag = list_lag
    theirs = []

    def sleep(seconds):
        harness.advance(seconds)
        if harness.job(FIRST) is None or theirs:
            return
        end(harness, FIRST)
        del harness.world.habits.quotas["ml.m5.xlarge"]
        theirs.extend(launch(harness.make_executor(), 2 if same else 1))

    backoff = Backoff(clock=harness.clock, sleep=sleep)
    waits = harness.make_executor(backoff=backoff, quota_timeout=600)
    with pytest.raises(
        (RunConflictError, LaunchError), match=f"{FIRST}, which this .* ended meanwhile, and"
    ):
        launch(waits, 2)
    harness.settle()
    assert [job.name for job in harness.world.jobs()] == [
        each.metadata["job_name"] for each in theirs
    ]
    assert {job.status[0] for job in harness.world.jobs()} == {"InProgress"}


def events(executor):
    """The events of its client of SageMaker."""
    return executor._client._of("sagemaker").meta.events


def replaced(harness, name):
    """A job is ended, and another launch takes its name."""
    end(harness, name)
    launch(harness.make_executor(), 1, gpu="L4")
    harness.of(harness.make_executor().attach("run-1")[0]).start()


@pytest.mark.parametrize("verb", ["cancel", "cancel_run"])
def test_a_stop_that_has_met_another_job_says_so(harness, verb):
    """The job is replaced when the launcher has looked, and before it sends the stop."""
    (handle,) = launch(harness.make_executor(), 1)
    ours = harness.make_executor()
    events(ours).register(
        "before-send.sagemaker.StopTrainingJob", lambda **_: replaced(harness, FIRST)
    )
    with pytest.raises(BackendError, match=f"{FIRST} .* is another's by now, and that"):
        ours.cancel(handle) if verb == "cancel" else ours.cancel_run("run-1")
    assert harness.job(FIRST).status[0] == "Stopping"


def test_a_launch_that_fails_and_has_stopped_another_job_says_so(harness, caplog):
    ours = harness.make_executor()
    events(ours).register(
        "before-send.sagemaker.StopTrainingJob", lambda **_: replaced(harness, FIRST)
    )
    harness.stand_in.faults.add("forbidden", verb="CreateTrainingJob", after=1)
    with pytest.raises(ForbiddenError):
        launch(ours, 2)
    assert f"{FIRST} is another launch's by now, and was stopped" in caplog.text


def test_a_purge_leaves_a_job_that_has_taken_a_name_meanwhile(harness):
    ours = harness.make_executor()
    handles = launch(harness.make_executor(), 2)
    for handle in handles:
        harness.of(handle).start()
        harness.of(handle).fail(1)
    harness.settle()

    def again(**_):
        """As if another purge had been faster, and its run was launched again."""
        if harness.job(SECOND) is None and harness.of(handles[0]).status[0] == "Failed":
            harness.api.delete_training_job(TrainingJobName=FIRST)
            for handle in launch(harness.make_executor(), 2):
                harness.of(handle).start()
                harness.of(handle).log("theirs")

    events(ours).register("after-call.sagemaker.DeleteTrainingJob", again)
    ours.purge(handles[0])
    theirs = harness.make_executor()
    assert [theirs.stream_logs(each) for each in theirs.attach("run-1")] == ["theirs"] * 2
