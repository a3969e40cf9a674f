"""Names that go to another launch while one is at work, and clients that try again themselves."""

from datetime import UTC, datetime, timedelta

import boto3
import botocore.session
import pytest
from botocore.config import Config
from botocore.credentials import DeferredRefreshableCredentials
from botocore.exceptions import CredentialRetrievalError
from scripted_aws import OnDemandHarness

from diloco_protocol import (
    BackendError,
    Backoff,
    ForbiddenError,
    LaunchError,
    Reason,
    RunConflictError,
    UnavailableError,
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


def patient_client(harness, refresh=None):
    """A client with retries of its own, and with credentials that each try gets anew."""
    core = botocore.session.Session()
    options = dict(harness.stand_in.client_options)
    if refresh is not None:
        core._credentials = DeferredRefreshableCredentials(refresh, "a test")
        del options["aws_access_key_id"], options["aws_secret_access_key"]
    again = Config(retries={"total_max_attempts": 2, "mode": "standard"})
    return boto3.Session(botocore_session=core).client("sagemaker", **options, config=again)


def away_after_one(client, operation):
    """No connection is possible for the second try of an operation."""
    tries = []

    def lead_astray(request, **_):
        tries.append(request)
        if len(tries) == 2:
            request.url = "http://127.0.0.1:1/"

    client.meta.events.register(f"before-send.sagemaker.{operation}", lead_astray)


def lose_answer(harness, operation):
    """The next call of an operation is carried out, and nobody hears of it."""
    harness.stand_in.faults.add("ambiguous", verb=operation, resource="sagemaker")


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_job_whose_create_was_lost_before_nobody_could_be_reached(harness, patience):
    client = patient_client(harness)
    lose_answer(harness, "CreateTrainingJob")
    away_after_one(client, "CreateTrainingJob")
    executor = harness.make_executor(sagemaker_client=client, retry_timeout=patience)
    if patience:
        assert [each.rank for each in launch(executor, 1)] == [0]
    else:
        with pytest.raises(UnavailableError, match=r"an earlier try, .* may have"):
            launch(executor, 1)
    assert harness.living() == bool(patience)


def test_a_job_whose_create_was_lost_before_the_credentials_were(harness):
    sent, known = [], harness.stand_in.client_options

    def refresh():
        if sent:
            raise CredentialRetrievalError(provider="a test", error_msg="no more")
        return {
            "access_key": known["aws_access_key_id"],
            "secret_key": known["aws_secret_access_key"],
            "token": None,
            "expiry_time": (datetime.now(UTC) + timedelta(seconds=5)).isoformat(),
        }

    client = patient_client(harness, refresh)
    client.meta.events.register(
        "before-send.sagemaker.CreateTrainingJob", lambda **_: sent.append(True)
    )
    lose_answer(harness, "CreateTrainingJob")
    executor = harness.make_executor(sagemaker_client=client, retry_timeout=0.0)
    with pytest.raises(LaunchError, match=rf"no more.*survivors \({FIRST}\)") as caught:
        launch(executor, 1)
    sent.clear()
    executor.cancel(caught.value.survivors[0])
    harness.settle()
    assert harness.living() == 0


def test_a_job_whose_create_was_lost_and_whose_name_is_taken_is_named(harness):
    client = patient_client(harness)
    lose_answer(harness, "CreateTrainingJob")
    harness.stand_in.faults.add("forbidden", verb="DescribeTrainingJob", times=None)
    with pytest.raises(LaunchError, match=rf"not authorized.*survivors \({FIRST}\)") as caught:
        launch(harness.make_executor(sagemaker_client=client), 1)
    harness.clear()
    harness.make_executor().cancel(caught.value.survivors[0])
    harness.settle()
    assert harness.living() == 0


@pytest.mark.parametrize("away", [True, False])
def test_a_job_whose_stop_was_lost_before_another_try_was_cancelled(harness, away):
    client = patient_client(harness)
    (handle,) = launch(harness.make_executor(), 1)
    harness.of(handle).start()
    lose_answer(harness, "StopTrainingJob")
    if away:
        away_after_one(client, "StopTrainingJob")
    harness.make_executor(sagemaker_client=client).cancel(handle)
    harness.settle()
    assert harness.make_executor().describe(handle).reason is Reason.CANCEL_REQUESTED


def replaced(harness, name):
    """A job is ended, and another launch takes its name."""
    end(harness, name)
    launch(harness.make_executor(), 1, gpu="L4")
    harness.of(harness.make_executor().attach("run-1")[0]).start()


@pytest.mark.parametrize("verb", ["cancel", "cancel_run"])
def test_a_stop_that_has_met_another_job_says_so(harness, verb):
    """The job is replaced when the launcher has looked, and before it sends the stop."""
    client = patient_client(harness)
    (handle,) = launch(harness.make_executor(), 1)
    client.meta.events.register(
        "before-send.sagemaker.StopTrainingJob", lambda **_: replaced(harness, FIRST)
    )
    ours = harness.make_executor(sagemaker_client=client)
    with pytest.raises(BackendError, match=f"{FIRST} .* is another's by now, and that"):
        ours.cancel(handle) if verb == "cancel" else ours.cancel_run("run-1")
    assert harness.job(FIRST).status[0] == "Stopping"


def test_a_launch_that_fails_and_has_stopped_another_job_says_so(harness, caplog):
    client = patient_client(harness)
    client.meta.events.register(
        "before-send.sagemaker.StopTrainingJob", lambda **_: replaced(harness, FIRST)
    )
    harness.stand_in.faults.add("forbidden", verb="CreateTrainingJob", after=1)
    with pytest.raises(ForbiddenError):
        launch(harness.make_executor(sagemaker_client=client), 2)
    assert f"{FIRST} is another launch's by now, and was stopped" in caplog.text


def test_a_purge_leaves_a_job_that_has_taken_a_name_meanwhile(harness):
    client = patient_client(harness)
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

    client.meta.events.register("after-call.sagemaker.DeleteTrainingJob", again)
    harness.make_executor(sagemaker_client=client).purge(handles[0])
    theirs = harness.make_executor()
    assert [theirs.stream_logs(each) for each in theirs.attach("run-1")] == ["theirs"] * 2
