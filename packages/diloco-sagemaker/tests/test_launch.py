"""Launches: all or nothing, each job exactly once."""

import contextlib

import pytest
from scripted_aws import AWSHarness, unnamed
from small_aws import NOT_FOUND, Refused

from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    FolderJournal,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    QuotaExceededError,
    ReplicaNotFoundError,
    RunConflictError,
    ThrottledError,
    UnavailableError,
)
from diloco_sagemaker._client._calls import Client

QUOTA = (
    "The account-level service limit 'ml.g5.2xlarge for training job usage' is 2 Instances, with "
    "current utilization of 2 Instances and a request delta of 1 Instances."
)


def launch(executor, n=3, **options):
    return executor.launch_replicas(n, "trainer:train", {"a": 1}, run_id="run-1", **options)


def test_a_launch(aws, executor):
    handles = launch(executor())
    assert [handle.metadata["job_name"] for handle in handles] == sorted(aws.jobs)
    assert len(aws.jobs) == 3
    assert {handle.metadata["region"] for handle in handles} == {"eu-west-1"}


def test_what_is_sent_is_the_plan(aws, executor):
    first = executor()
    planned = first.plan(2, "trainer:train", {"a": 1}, run_id="run-1").requests
    assert aws.calls == []
    launch(first, 2)
    sent = {
        body["TrainingJobName"]: unnamed(body)
        for call, body in aws.calls
        if call == "CreateTrainingJob"
    }
    assert sent == {job["TrainingJobName"]: job for job in planned}


def test_the_same_launch_twice_gives_the_same_handles(aws, executor):
    handles = launch(executor())
    assert launch(executor()) == handles
    assert aws.count("CreateTrainingJob") == 3


def test_another_launch_of_that_name_is_a_conflict(aws, executor):
    launch(executor())
    with pytest.raises(
        RunConflictError, match=r"different: choose another run_id, or purge.*attach\('run-1'\)"
    ):
        launch(executor(), gpu="H100")
    assert len(aws.jobs) == 3


def test_a_launch_of_another_image_is_another_launch(aws, executor):
    launch(executor())
    with pytest.raises(RunConflictError, match="choose another run_id"):
        launch(executor(image_uri="123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:2"))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_answer_creates_nothing_twice(aws, executor, rank):
    for number in range(rank + 1):
        done = number == rank
        aws.faults.append(("CreateTrainingJob", "InternalFailure", "", 500, done))
    assert len(launch(executor())) == 3
    assert len(aws.jobs) == 3


def test_throttling_slows_a_launch_and_does_not_end_it(aws, executor):
    aws.faults += [("CreateTrainingJob", "ThrottlingException", "Rate exceeded", 400, False)] * 8
    assert len(launch(executor(), 12)) == 12


def test_quota_takes_back_what_was_created(aws, executor):
    first = executor()
    launch_all = launch(first, 2)
    assert len(launch_all) == 2
    aws.faults += [("CreateTrainingJob", "ResourceLimitExceeded", QUOTA, 400, False)]
    with pytest.raises(
        QuotaExceededError, match=r"ml\.g5\.2xlarge .*is 2 Instances.*quota_timeout="
    ):
        first.launch_replicas(1, "trainer:train", run_id="run-2")
    assert sorted(aws.jobs) == ["diloco-run-1-00000", "diloco-run-1-00001"]


def test_a_refusal_in_the_middle_leaves_nothing_alive(aws, executor):
    taken = aws.CreateTrainingJob

    def create(body):
        if body["TrainingJobName"].endswith("-00002"):
            aws.faults.append(("CreateTrainingJob", "AccessDeniedException", "no", 400, False))
            return aws.answer("CreateTrainingJob", body)
        return taken(body)

    aws.CreateTrainingJob = create
    with pytest.raises(Exception, match="launcher_policy"):
        launch(executor(), 4)
    assert aws.jobs == {}


def test_what_cannot_be_stopped_is_a_survivor(aws, executor):
    taken = aws.CreateTrainingJob

    def create(body):
        if body["TrainingJobName"].endswith("-00001"):
            aws.faults.append(("CreateTrainingJob", "AccessDeniedException", "no", 400, False))
            aws.faults.append(("StopTrainingJob", "AccessDeniedException", "no", 400, False))
            return aws.answer("CreateTrainingJob", body)
        return taken(body)

    aws.CreateTrainingJob = create
    with pytest.raises(LaunchError, match=r"survivors \(diloco-run-1-00000\)") as raised:
        launch(executor(), 2)
    (survivor,) = raised.value.survivors
    assert survivor.rank == 0
    assert executor().poll(survivor).value == "pending"


@pytest.mark.parametrize("rank", [2, 3])
def test_what_a_killed_launcher_has_created_is_named_when_its_launch_fails_again(
    aws, executor, rank
):
    """Also if nothing was created anew."""
    launch(executor(), 4)
    for number in (2, 3):
        del aws.jobs[f"diloco-run-1-{number:05d}"]
    create = aws.CreateTrainingJob

    def refused(body):
        if body["TrainingJobName"].endswith(str(rank)):
            aws.faults.append(("CreateTrainingJob", "AccessDeniedException", "no", 400, False))
            return aws.answer("CreateTrainingJob", body)
        return create(body)

    aws.CreateTrainingJob = refused
    with pytest.raises(
        LaunchError, match=r"2 training jobs .*00000, diloco-run-1-00001\)"
    ) as raised:
        launch(executor(), 4)
    assert sorted(aws.jobs) == ["diloco-run-1-00000", "diloco-run-1-00001"]
    assert [executor().poll(each) for each in raised.value.survivors] == ["pending"] * 2


@pytest.mark.parametrize("journal", [True, False])
def test_survivors_of_an_earlier_life_of_a_launch_are_not_those_of_a_later_one(
    aws, executor, tmp_path, journal
):
    """A launch fails beside a killed launcher's jobs; all are ended and purged; it comes again."""
    ours = executor(journal=FolderJournal(tmp_path / "journal") if journal else None)

    def refused(_):
        raise BackendError("no quota today")

    lives = []
    for _ in range(2):
        remains(aws, executor, 0, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours._client, "create", refused)
            with pytest.raises(LaunchError, match="no quota today") as caught:
                launch(ours, 4)
        lives.append(caught.value.survivors)
        if len(lives) == 1:
            for handle in lives[0]:
                ours.cancel(handle)
                aws.move(handle.metadata["job_name"], "Stopped", "Stopped")
            assert {each["status"] for each in ours.collect(lives[0])} == {"cancelled"}
            ours.purge(lives[0][0])
            assert aws.jobs == {}
    assert [ours.poll(handle) for handle in lives[1]] == ["pending"] * 2
    ours.cancel(lives[0][0])
    assert {job["TrainingJobStatus"] for job in aws.jobs.values()} == {"InProgress"}


def test_a_job_that_another_launch_has_created_is_none_of_ours_though_an_answer_was_lost(
    aws, executor
):
    """It has the same fingerprint, the list lags, and what was lost may have been its create."""
    handles = launch(executor(), 2)
    aws.lists_lag = True
    create, asked = aws.CreateTrainingJob, set()

    def refused(body):
        name = body["TrainingJobName"]
        fault = ("InternalFailure", "", 500) if name.endswith("0") else ("AccessDenied", "no", 400)
        if name in asked:  # the name is taken
            return create(body)
        asked.add(name)
        aws.faults.append(("CreateTrainingJob", *fault, False))
        return aws.answer("CreateTrainingJob", body)

    aws.CreateTrainingJob = refused
    with pytest.raises(LaunchError, match=r"survivors \(diloco-run-1-00000\)") as caught:
        launch(executor(), 2)
    assert list(caught.value.survivors) == handles[:1]
    assert {job["TrainingJobStatus"] for job in aws.jobs.values()} == {"InProgress"}


def test_a_job_that_comes_late_is_not_that_of_a_later_launch(aws, executor):
    """The first create and its answer were lost, AWS was away, the survivor never seen again."""
    ours = executor(retry_timeout=1)

    def away(*_):
        raise UnavailableError("away")

    lives = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            for verb in ("create", "describe", "stop"):
                patch.setattr(ours._client, verb, away)
            with pytest.raises(LaunchError) as caught:
                launch(ours, 1)
        lives += caught.value.survivors
    assert lives[0] != lives[1]
    (handle,) = launch(ours, 1)
    for survivor in lives:
        ours.cancel(survivor)
        ours.purge(survivor)
        with pytest.raises(ReplicaNotFoundError):
            ours.describe(survivor)
    assert ours.poll(handle) == "pending"


@pytest.fixture
def harness():
    made = AWSHarness()
    yield made
    made.close()


def test_a_job_of_another_launcher_is_left_alone_after_a_throttled_look(harness, monkeypatch):
    """Its name was taken, so this launcher has not created it, whatever the next look says."""
    create, describe = Client.create, Client.describe
    throttled = [ThrottledError("slow down")]

    def describe_later(client, name):
        if throttled:
            raise throttled.pop()
        return describe(client, name)

    def create_later(client, request):
        monkeypatch.setattr(Client, "create", create)
        launch(harness.make_executor(), 2)  # the other launcher is faster
        monkeypatch.setattr(Client, "create", refuse_second)
        monkeypatch.setattr(Client, "describe", describe_later)
        return create(client, request)

    monkeypatch.setattr(Client, "create", create_later)

    def refuse_second(client, request):
        if request["TrainingJobName"].endswith("1"):
            raise BackendError("no quota today")
        return create(client, request)

    with pytest.raises(LaunchError, match=r"no quota today.*00000\)") as caught:
        launch(harness.make_executor(), 2)
    assert not throttled
    assert harness.make_executor().poll(caught.value.survivors[0]) == "pending"


def test_a_job_that_goes_while_its_run_is_looked_at(harness, monkeypatch):
    """That says nothing of the others."""
    handles = launch(harness.make_executor(), 2)
    for handle in handles:
        harness.of(handle).start()
    name = handles[1].metadata["job_name"]
    harness.api.stop_training_job(TrainingJobName=name)
    harness.world.settle(within=300)
    is_tagged = Client.is_tagged

    def gone(client, arn, key):
        with contextlib.suppress(Exception):
            harness.api.delete_training_job(TrainingJobName=name)
        harness.world.settle(within=300)
        return is_tagged(client, arn, key)

    monkeypatch.setattr(Client, "is_tagged", gone)
    found = harness.make_executor().collect(handles, timeout=0)
    assert [(each["status"], each["reason"]) for each in found] == [
        ("running", None),
        ("failed", "lost"),
    ]


def test_an_interrupt_names_what_a_killed_launcher_has_created(aws, executor):
    launch(executor(), 2)
    del aws.jobs["diloco-run-1-00001"]
    ours = executor()

    def interrupted(*_):
        raise KeyboardInterrupt

    ours._client.create = interrupted
    with pytest.raises(KeyboardInterrupt) as raised:
        launch(ours, 2)
    assert raised.value.__notes__[0].endswith("survivors (diloco-run-1-00000)")


def remains(aws, executor, *ranks, n=4):
    """A launch was killed when it had created these ranks."""
    launch(executor(), n)
    for number in set(range(n)) - set(ranks):
        del aws.jobs[f"diloco-run-1-{number:05d}"]


def strange(aws, rank):
    """Somebody takes the name of a rank."""
    job = next(iter(aws.jobs.values()))
    name = f"diloco-run-1-{rank:05d}"
    arn = job["TrainingJobArn"].replace(job["TrainingJobName"], name)
    aws.jobs[name] = {
        **job, "TrainingJobName": name, "TrainingJobArn": arn, "HyperParameters": {}
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 3])
def test_a_name_that_is_taken_hides_no_job_of_a_killed_launcher(aws, executor, rank):
    """Whether the list has it, or the create finds it."""
    remains(aws, executor, 1, 2)
    create, late = aws.CreateTrainingJob, rank == 3

    def taken(body):
        if late and body["TrainingJobName"].endswith("3"):
            strange(aws, rank)
        return create(body)

    aws.CreateTrainingJob = taken
    if not late:
        strange(aws, rank)
    with pytest.raises(LaunchError, match=r"not launched by diloco: choose.* survivors ") as raised:
        launch(executor(), 4)
    assert [each.rank for each in raised.value.survivors] == [1, 2]
    assert isinstance(raised.value.__cause__, RunConflictError)
    assert len(aws.jobs) == 3


def test_a_job_that_was_ended_meanwhile_hides_no_other_one(aws, executor):
    remains(aws, executor, 0, 1)
    create = aws.CreateTrainingJob

    def ended(body):
        aws.move("diloco-run-1-00001", "Stopped", "Stopped")
        return create(body)

    aws.CreateTrainingJob = ended
    ours = executor()
    for says in (
        r"00001, .* was ended meanwhile",
        r"00001 of an earlier try .*00002 was not there",
    ):
        text = rf"{says}.*cancel_run\('run-1'\), and purge.*survivors \(diloco-run-1-00000\)"
        with pytest.raises(LaunchError, match=text):
            launch(ours, 4)
        aws.CreateTrainingJob = create
    ours.cancel_run("run-1")
    aws.move("diloco-run-1-00000", "Stopped", "Stopped")
    ours.purge(ours.attach("run-1")[0])
    assert len(launch(ours, 4)) == 4


@pytest.mark.parametrize("over", [True, False])
def test_a_look_that_fails_names_what_the_list_has(aws, executor, over):
    """Also while nobody can say whose jobs these are."""
    remains(aws, executor, 0, 1)
    if over:
        aws.move("diloco-run-1-00001", "Stopped", "Stopped")
    ours, first = executor(), r"diloco-run-1-00000\b"
    described = ours._jobs.described

    def refused(names):
        if not over or not names[0].endswith(("0", "1")):
            raise ForbiddenError("no")
        return described(names)

    ours._jobs.described = refused
    aws.Search = lambda body: {"Results": []}
    with pytest.raises(LaunchError, match=f"no.*{first}") as raised:
        launch(ours, 4)
    assert [each.rank for each in raised.value.survivors] == ([0] if over else [0, 1])
    for handle in raised.value.survivors:
        ours.cancel(handle)
    assert aws.jobs["diloco-run-1-00000"]["TrainingJobStatus"] == "Stopping"

    def interrupted(*_):
        raise KeyboardInterrupt

    aws.move("diloco-run-1-00000", "InProgress", "Training")
    ours._jobs.details = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(ours, 4)
    assert "diloco-run-1-00000" in caught.value.__notes__[0]


def test_survivors_that_are_of_another_launch_are_left_alone(aws, executor):
    """As long as the jobs cannot be looked at, nobody knows."""
    launch(executor(), 2, gpu="H100")
    ours = executor()

    def refused(*_):
        raise ForbiddenError("no")

    ours._jobs.details = refused
    with pytest.raises(LaunchError) as raised:
        launch(ours, 2)
    for handle in raised.value.survivors:
        ours.cancel(handle)
    assert {job["TrainingJobStatus"] for job in aws.jobs.values()} == {"InProgress"}


def test_a_job_that_has_just_been_created_may_appear_later(aws, executor):
    aws.lists_lag = True
    missing = ("DescribeTrainingJob", "ValidationException", "Requested resource not found.", 400)
    aws.faults += [(*missing, False)] * 2
    assert len(launch(executor(), 2)) == 2


def test_a_survivor_without_a_job_purges_nothing_and_says_what_does(aws, executor):
    """The create of job 1 and its answer were lost, and AWS was away at the launch's undoing."""
    ours = executor(retry_timeout=1, clock=aws.clock)

    def away(*_):
        raise UnavailableError("away")

    create = ours._client.create
    with pytest.MonkeyPatch.context() as patch:
        lost = lambda job: (away if job["TrainingJobName"].endswith("1") else create)(job)  # noqa: E731
        patch.setattr(ours._client, "create", lost)
        patch.setattr(ours._client, "describe", away)
        patch.setattr(ours._client, "stop", away)
        with pytest.raises(LaunchError) as caught:
            launch(ours, 2)
    aws.sleep(30)  # "not found" is believed from now on
    with pytest.raises(BackendError, match=r"not diloco-run-1-00000, .* attach\('run-1'\)"):
        ours.purge(caught.value.survivors[1])
    assert list(aws.jobs) == ["diloco-run-1-00000"]


def test_a_job_that_is_taken_back_may_appear_later(aws, executor):
    missing = ("StopTrainingJob", "ValidationException", "Requested resource not found.", 400)
    aws.faults += [(*missing, False)] * 2
    ours = executor()
    create = ours._client.create

    def refused(job):
        if job["TrainingJobName"].endswith("1"):
            raise BackendError("no quota today")
        create(job)

    ours._client.create = refused
    with pytest.raises(BackendError, match="no quota today") as caught:
        launch(ours, 2)
    assert type(caught.value) is BackendError  # nothing is left
    assert (aws.jobs, aws.faults) == ({}, [])


def test_waiting_for_quota(aws, executor):
    aws.faults += [("CreateTrainingJob", "ResourceLimitExceeded", QUOTA, 400, False)] * 5
    assert len(launch(executor(quota_timeout=600))) == 3


def test_credentials_that_are_missing_or_expired(aws, executor, monkeypatch):
    aws.faults.append(("ListTrainingJobs", "ExpiredTokenException", "expired", 400, False))
    with pytest.raises(AuthError, match="expired"):
        launch(executor(retry_timeout=0))
    assert aws.jobs == {}


def test_variables_that_are_named_like_secrets_are_warned_of(executor, caplog):
    launch(executor(), env={"API_TOKEN": "x", "STEPS": "1"})
    (record,) = caplog.records
    assert record.getMessage().startswith("named like secrets: API_TOKEN. Anyone who may describe")


def test_no_region(executor, monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(InvalidRequestError, match=r"specify a region\. Look at region="):
        launch(executor(region=None))


def test_an_interrupt_leaves_nothing_alive(aws, executor):
    aws.faults += [("CreateTrainingJob", "ThrottlingException", "Rate exceeded", 400, False)]
    ours = executor()
    sleep = aws.sleep

    def interrupted(seconds):
        if aws.jobs and aws.count("DeleteTrainingJob") == 0:
            aws.faults.clear()
            raise KeyboardInterrupt
        sleep(seconds)

    create = aws.CreateTrainingJob

    def throttled_from_the_second_on(body):
        answer = create(body)
        aws.faults[:] = [("CreateTrainingJob", "ThrottlingException", "Rate", 400, False)] * 99
        return answer

    aws.CreateTrainingJob = throttled_from_the_second_on
    object.__setattr__(ours._backoff, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(ours, 4)
    assert aws.jobs == {}


@pytest.mark.parametrize("where", ["look", "handles"])
def test_an_interrupt_after_the_last_create_leaves_nothing_alive(aws, executor, monkeypatch, where):
    ours = executor()

    def interrupted(*_):
        assert len(aws.jobs) == 3
        raise KeyboardInterrupt

    if where == "look":
        ours._created = interrupted
    else:
        monkeypatch.setattr("diloco_sagemaker._executor.make_handle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(ours)
    assert aws.jobs == {}


@pytest.mark.sampled
@pytest.mark.parametrize("late", [1, 8, 40])
@pytest.mark.parametrize("rank", [0, 1])
def test_creates_that_come_late_leave_nothing_alive(aws, executor, late, rank):
    """Several are sent for one job, all answers are lost, and each is done some seconds later."""
    create, sleep, due = aws.CreateTrainingJob, aws.sleep, []

    def lost(body):
        if not body["TrainingJobName"].endswith(str(rank)):
            return create(body)
        due.append((aws.now + late, body))
        aws.faults.append(("CreateTrainingJob", "InternalFailure", "", 500, False))
        return aws.answer("CreateTrainingJob", body)

    def sleeping(seconds):
        sleep(seconds)
        for each in [each for each in due if each[0] <= aws.now]:
            due.remove(each)
            with contextlib.suppress(Exception):  # its name is taken
                create(each[1])

    aws.CreateTrainingJob = lost
    ours = executor(retry_timeout=5)
    object.__setattr__(ours._backoff, "sleep", sleeping)
    with pytest.raises(UnavailableError):
        launch(ours)
    for _ in range(10):
        sleeping(10)
    assert due == []
    assert aws.jobs == {}


@pytest.mark.sampled
@pytest.mark.parametrize("status", ["Stopping", "Stopped", None])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_job_that_its_own_launch_takes_back_is_not_returned(aws, executor, rank, status):
    """Two processes launch the same; a job's creator is interrupted after the other has met it."""
    launch(executor())
    for number in {0, 1, 2} - {rank}:
        del aws.jobs[f"diloco-run-1-{number:05d}"]
    create, met = aws.CreateTrainingJob, f"diloco-run-1-{rank:05d}"

    def create_meanwhile(body):
        answer = create(body)
        if status is None:
            aws.jobs.pop(met, None)
        else:
            aws.move(met, status, status)
        return answer

    aws.CreateTrainingJob = create_meanwhile
    with pytest.raises(
        RunConflictError, match=rf"{met}, which another launch .*cancel_run\('run-1'\), and purge"
    ):
        launch(executor())
    assert sorted(aws.jobs) == ([] if status is None else [met])


def test_a_run_that_has_ended_can_be_launched_again(aws, executor):
    handles = launch(executor())
    aws.move("diloco-run-1-00000", "Stopped", "Stopped")
    assert launch(executor()) == handles


@pytest.mark.sampled
@pytest.mark.parametrize("status", ["Stopping", "Stopped", "Completed"])
def test_a_run_of_which_some_has_ended_is_not_completed(aws, executor, status):
    """A launch that failed could not delete what it has stopped, or a purge was interrupted."""
    handles = launch(executor())
    aws.move("diloco-run-1-00000", status, status)
    gone = aws.jobs.pop("diloco-run-1-00002")
    with pytest.raises(
        LaunchError, match=r"00000 of an earlier try .*00002 was not there"
    ) as caught:
        launch(executor())
    assert [each.rank for each in caught.value.survivors] == [1]
    assert sorted(aws.jobs) == ["diloco-run-1-00000", "diloco-run-1-00001"]
    aws.jobs[gone["TrainingJobName"]] = gone
    listed = aws.ListTrainingJobs

    def lagging(body):
        page = listed(body)
        kept = [each for each in page["TrainingJobSummaries"] if each["TrainingJobName"][-1] != "2"]
        return {**page, "TrainingJobSummaries": kept}

    aws.ListTrainingJobs = lagging
    assert launch(executor()) == handles


@pytest.mark.sampled
@pytest.mark.parametrize("status", ["Stopping", "Stopped"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_of_which_some_has_ended_is_not_completed_where_the_list_lags(
    aws, executor, rank, status
):
    """A launcher was killed after it stopped its job, before it deleted it; a create finds that."""
    remains(aws, executor, rank)
    aws.move(f"diloco-run-1-{rank:05d}", status, status)
    aws.lists_lag = True
    ours = executor()
    found = rf"{rank:05d} of an earlier try .* was not there.*cancel_run\('run-1'\), and purge"
    with pytest.raises(RunConflictError, match=found):
        launch(ours, 4)
    assert list(aws.jobs) == [f"diloco-run-1-{rank:05d}"]


def test_a_run_that_has_ended_is_found_where_the_list_lags(aws, executor):
    handles = launch(executor())
    for handle in handles:
        aws.move(handle.metadata["job_name"], "Completed", "Completed")
    aws.lists_lag = True
    assert launch(executor()) == handles


def waiting_for_quota(aws, executor, meanwhile):
    """An executor whose second job finds no room at first; something happens while it waits."""
    create = aws.CreateTrainingJob

    def full(body):
        if body["TrainingJobName"].endswith("1"):
            raise Refused("ResourceLimitExceeded", QUOTA)
        return create(body)

    def sleep(seconds):
        aws.sleep(seconds)
        if aws.CreateTrainingJob is full and aws.jobs:
            aws.CreateTrainingJob = create
            meanwhile()

    aws.CreateTrainingJob = full
    return executor(quota_timeout=60, backoff=Backoff(clock=aws.clock, sleep=sleep))


def test_a_launch_that_fails_ends_no_job_of_a_later_launch_of_its_name(aws, executor):
    """It waits for quota while its run is removed, and the name used again."""

    def meanwhile():
        aws.jobs.clear()
        executor().launch_replicas(2, "trainer:other", run_id="run-1")

    waits = waiting_for_quota(aws, executor, meanwhile)
    with pytest.raises(RunConflictError, match="of another launch"):
        launch(waits, 2)
    assert [job["TrainingJobStatus"] for job in aws.jobs.values()] == ["InProgress"] * 2


def test_a_run_that_is_cancelled_while_its_launch_waits_is_not_completed(aws, executor):
    waits = waiting_for_quota(aws, executor, lambda: executor().cancel_run("run-1"))
    with pytest.raises(RunConflictError, match=r"which this launch had created, was ended meanw"):
        launch(waits, 2)
    assert aws.jobs == {}


def test_a_survivor_that_is_not_seen_yet_is_ended(aws, executor):
    """Its handle does not say when its job was created."""
    ours, lists = executor(clock=aws.clock), []

    def fails(body):
        lists.append(body)
        if len(lists) > 1:
            raise Refused("AccessDeniedException", "no")
        return {"TrainingJobSummaries": []}

    aws.ListTrainingJobs = fails
    with pytest.raises(LaunchError) as raised:
        launch(ours, 1)
    aws.faults.append(("DescribeTrainingJob", *NOT_FOUND, 400, False))
    ours.cancel(raised.value.survivors[0])
    assert aws.jobs["diloco-run-1-00000"]["TrainingJobStatus"] == "Stopping"


def test_a_job_of_an_unknown_status_is_not_taken_to_be_over(aws, executor):
    handles = launch(executor(), 2)
    aws.jobs["diloco-run-1-00000"]["TrainingJobStatus"] = "Paused"
    del aws.jobs["diloco-run-1-00001"]
    assert launch(executor(), 2)[0] == handles[0]
    assert len(aws.jobs) == 2
