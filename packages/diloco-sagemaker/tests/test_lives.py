"""What becomes of replicas, and what is said of it."""

import json
from dataclasses import replace

import pytest

from diloco_protocol import (
    BackendError,
    FolderJournal,
    InvalidRequestError,
    Outcome,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    UnavailableError,
    outcome_to_message,
)
from diloco_sagemaker._client._calls import Client

PENDING, RUNNING = ReplicaState.PENDING, ReplicaState.RUNNING
SUCCEEDED, FAILED, CANCELLED = ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.CANCELLED


@pytest.fixture
def run(aws, executor):
    return executor().launch_replicas(2, "trainer:train", run_id="run-1")


def name(handle):
    return handle.metadata["job_name"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("status", "secondary", "state", "reason", "stopping"),
    [
        ("InProgress", "Starting", PENDING, Reason.STARTING, False),
        ("InProgress", "Pending", PENDING, Reason.QUEUED, False),
        ("InProgress", "Downloading", PENDING, Reason.IMAGE, False),
        ("InProgress", "Training", RUNNING, None, False),
        ("InProgress", "SomethingNew", PENDING, None, None),
        ("Deleting", "SomethingNew", None, None, None),
        ("Completed", "Completed", SUCCEEDED, Reason.COMPLETED, False),
        ("Failed", "Failed", FAILED, None, False),
        ("Stopped", "MaxRuntimeExceeded", FAILED, Reason.TIMEOUT, False),
        ("Stopped", "MaxWaitTimeExceeded", FAILED, Reason.TIMEOUT, False),
        ("Stopped", "Stopped", CANCELLED, Reason.STOPPED_EXTERNALLY, False),
    ],
)
def test_states(aws, executor, run, status, secondary, state, reason, stopping):
    aws.move(name(run[1]), status, secondary)
    found = executor().describe(run[1])
    if secondary == "SomethingNew":
        assert not found.state.terminal
        return
    assert (found.state, found.stopping) == (state, stopping)
    if reason is not None:
        assert found.reason is reason


def test_stopping_is_no_end(aws, executor, run):
    ours = executor()
    aws.move(name(run[0]), "InProgress", "Training")
    ours.cancel(run[0])
    found = ours.describe(run[0])
    assert (found.state, found.stopping) == (RUNNING, True)
    aws.move(name(run[0]), "Stopped", "Stopped")
    for each in (ours, executor()):
        found = each.describe(run[0])
        assert (found.state, found.reason) == (CANCELLED, Reason.CANCEL_REQUESTED)
    assert ours.poll(run[1]) is PENDING  # the other lives on
    ours.cancel(run[0])
    assert aws.count("StopTrainingJob") == 1


def test_a_cancel_that_is_refused_raises_and_can_be_repeated(aws, executor, run):
    aws.faults.append(
        ("StopTrainingJob", "ValidationException", "1 validation error detected", 400, False)
    )
    ours = executor()
    with pytest.raises(InvalidRequestError, match="validation error"):
        ours.cancel(run[0])
    ours.cancel(run[0])
    assert ours.describe(run[0]).stopping


@pytest.mark.parametrize("run_at_once", [False, True])
def test_a_cancel_whose_answer_was_lost_is_that_of_who_asked(aws, executor, run, run_at_once):
    aws.faults.append(("StopTrainingJob", "InternalFailure", "lost", 500, True))
    ours = executor()
    if run_at_once:
        ours.cancel_run("run-1")
    else:
        ours.cancel(run[0])
        ours.cancel(run[1])
    for handle in run:
        aws.move(name(handle), "Stopped", "Stopped")
    for each in (ours, executor()):
        assert [each.describe(handle).reason for handle in run] == [Reason.CANCEL_REQUESTED] * 2


def test_an_interruption_is_an_attempt(aws, executor, run):
    aws.move(name(run[0]), "InProgress", "Training")
    aws.move(name(run[0]), "InProgress", "Interrupted")
    found = executor().describe(run[0])
    assert (found.state, found.attempt, found.reason) == (PENDING, 2, Reason.PREEMPTED)
    aws.move(name(run[0]), "InProgress", "Starting")
    aws.move(name(run[0]), "InProgress", "Training")
    found = executor().describe(run[0])
    assert (found.state, found.attempt) == (RUNNING, 2)


def test_a_failure_says_what_the_runner_said(aws, executor, run):
    told = outcome_to_message(Outcome(143, reason=Reason.TIMEOUT, error="after 5 s", attempt=3))
    reason = f"AlgorithmError: {told.decode() if isinstance(told, bytes) else told}, exit code: 143"
    aws.move(name(run[0]), "Failed", "Failed", FailureReason=reason)
    found = executor().describe(run[0])
    assert (found.reason, found.exit_code, found.attempt) == (Reason.TIMEOUT, 143, 3)


def test_a_failure_without_word_of_the_runner(aws, executor, run):
    aws.move(name(run[0]), "InProgress", "Training")
    aws.move(name(run[0]), "Failed", "Failed", FailureReason="AlgorithmError: , exit code: 3")
    found = executor().describe(run[0])
    assert (found.state, found.reason, found.exit_code) == (FAILED, Reason.ERROR, 3)


def test_no_capacity(aws, executor):
    (handle,) = executor().launch_replicas(1, "trainer:train", run_id="run-1", gpu="H100:8")
    text = (
        "CapacityError: Unable to provision requested ML compute capacity. Please retry using a "
        "different ML instance type."
    )
    aws.move(name(handle), "Failed", "Failed", FailureReason=text)
    found = executor().describe(handle)
    assert found.reason is Reason.PLATFORM
    assert "no ml.p5.48xlarge to be had" in found.message
    assert "Another type" in found.message


def test_results(aws, executor, run):
    for handle in run:
        outcome = Outcome(0, result={"rank": handle.rank, "big": "x" * 100_000})
        text = outcome.to_json()
        aws.objects[f"/bucket/runs/{name(handle)}/output/model/diloco-outcome.json"] = text.encode()
        aws.move(name(handle), "Completed", "Completed")
    results = executor().collect([run[1], run[0]], timeout=100)
    assert [each["result"]["rank"] for each in results] == [1, 0]
    assert [each["exit_code"] for each in results] == [0, 0]
    aws.objects.clear()
    (lost, _) = executor().collect(run, timeout=100)
    assert lost["status"] == "succeeded"
    assert "result cannot be read" in lost["error"]


def test_purge_and_a_name_that_lives_again(aws, executor, run):
    ours = executor()
    with pytest.raises(InvalidRequestError, match=r"cancel_run\('run-1'\), and wait with collect"):
        ours.purge(run[0])
    for handle in run:
        aws.move(name(handle), "Completed", "Completed")
    ours.purge(run[0])
    assert aws.jobs == {}
    aws.sleep(5)
    again = executor().launch_replicas(2, "trainer:train", run_id="run-1")
    for each in (ours, executor()):
        with pytest.raises(ReplicaNotFoundError):
            each.poll(run[0])
        each.cancel(run[0])
        assert each.poll(again[0]) is PENDING
    assert aws.count("StopTrainingJob") == 0


def test_finding_runs_again(aws, executor, run):
    aws.CreateTrainingJob({"TrainingJobName": "somebody-elses"})
    aws.CreateTrainingJob({"TrainingJobName": "diloco-foreign-00000"})
    assert executor().list_runs() == ["run-1"]
    assert executor().attach("run-1") == run
    with pytest.raises(ReplicaNotFoundError, match=r"list_runs\(\) names"):
        executor().attach("run")
    assert ReplicaHandle.from_json(run[0].to_json()) == run[0]


def test_a_handle_of_another_place(aws, executor, run):
    with pytest.raises(InvalidRequestError, match="region='eu-west-1'"):
        executor(region="us-east-1").poll(run[0])
    data = json.loads(run[0].to_json())
    data["metadata"]["account"] = "210987654321"
    theirs = ReplicaHandle.from_dict(data)
    for jobs in (dict(aws.jobs), {}):
        aws.jobs = jobs
        ours = executor()
        for verb in (ours.poll, ours.cancel, ours.purge, ours.stream_logs):
            with pytest.raises(InvalidRequestError, match="account 210987654321"):
                verb(theirs)
        with pytest.raises(InvalidRequestError, match="account 210987654321"):
            ours.collect([theirs], timeout=5)
    assert aws.count("StopTrainingJob") == 0


def test_a_journal_gives_no_handles_of_another_account(executor, run, tmp_path):
    journal = FolderJournal(tmp_path)
    data = json.loads(run[0].to_json())
    data["metadata"]["account"] = "210987654321"
    journal.record_launch([replace(ReplicaHandle.from_dict(data), run_id="run-2")])
    with pytest.raises(ReplicaNotFoundError):
        executor(journal=journal).attach("run-2")


def away_for(aws, monkeypatch, seconds):
    """STS cannot be reached for so long; returns when it was asked."""
    begun, ask, asked = aws.now, Client._call, []

    def call(self, service, *arguments, **options):
        if service == "sts":
            asked.append(aws.now)
            if aws.now < begun + seconds:
                raise UnavailableError("cannot find out whose credentials these are")
        return ask(self, service, *arguments, **options)

    monkeypatch.setattr(Client, "_call", call)
    return asked


def test_whose_credentials_these_are_is_asked_only_where_it_matters(
    aws, executor, monkeypatch, tmp_path
):
    """What is found tells its account; another account would say the same of what is not there."""
    few, many = (
        executor().launch_replicas(n, "trainer:train", run_id=f"run-{n}", timeout=60)
        for n in (1, 4)
    )
    aws.logs[f"{name(few[0])}/algo-1-1"] = [(int(aws.now * 1000), "works")]
    asked = away_for(aws, monkeypatch, 1e9)
    for options in ({}, {"journal": FolderJournal(tmp_path)}):
        ours = executor(retry_timeout=0, **options)
        assert [ours.poll(each) for each in few] == [PENDING]
        assert [each["status"] for each in ours.collect(many, timeout=0)] == ["pending"] * 4
        assert ours.attach("run-4") == many
        assert ours.stream_logs(few[0]) == "works"
        with pytest.raises(InvalidRequestError, match="have not ended"):
            executor(retry_timeout=0).purge(few[0])
    ours.cancel(few[0])
    ours.cancel_run("run-4")
    assert all(ours.describe(each).stopping for each in (*few, *many))
    assert asked == []
    aws.jobs.clear()
    for verb in (ours.describe, ours.cancel, executor(retry_timeout=0).purge, ours.stream_logs):
        with pytest.raises(UnavailableError, match="whose credentials"):
            verb(few[0])


def test_collect_waits_as_long_as_it_is_told_for_who_asks(aws, executor, monkeypatch):
    handles = executor().launch_replicas(2, "trainer:train", run_id="run-1")
    aws.jobs.clear()
    away_for(aws, monkeypatch, 100)
    begun = aws.now
    with pytest.raises(UnavailableError, match="whose credentials"):
        executor().collect(handles, timeout=5)
    assert aws.now - begun < 6
    found = executor().collect(handles, timeout=600)
    assert [each["reason"] for each in found] == ["lost", "lost"]
    assert 100 <= aws.now - begun < 130


def test_a_look_without_change_makes_one_list_and_no_describe(aws, executor):
    ours = executor()
    handles = ours.launch_replicas(40, "trainer:train", run_id="run-1")
    ours.collect(handles, timeout=0)
    aws.calls.clear()
    ours.collect(handles, timeout=0)
    assert [call for call, _ in aws.calls] == ["ListTrainingJobs"]
    for handle in handles:
        aws.move(name(handle), "Failed", "Failed", FailureReason="AlgorithmError: , exit code: 1")
    aws.calls.clear()
    fresh = executor()
    assert {each["status"] for each in fresh.collect(handles, timeout=10)} == {"failed"}
    assert aws.count("DescribeTrainingJob") == 0
    assert aws.count("Search") == 1
    assert aws.count("ListTrainingJobs") == 1


def test_a_list_that_lags_hides_no_replica(aws, executor):
    aws.lists_lag = True
    ours = executor()
    handles = ours.launch_replicas(4, "trainer:train", run_id="run-1")
    assert {each["status"] for each in ours.collect(handles, timeout=0)} == {"pending"}


@pytest.mark.parametrize("most", [2, 0])
def test_a_list_that_lags_hides_no_replica_from_who_finds_the_run(aws, executor, most):
    handles = executor().launch_replicas(4, "trainer:train", run_id="run-1")
    ours, listed = executor(clock=lambda: aws.now), aws.ListTrainingJobs

    def lagging(body):
        page = listed(body)
        return {**page, "TrainingJobSummaries": page["TrainingJobSummaries"][:most]}

    aws.ListTrainingJobs = lagging
    assert ours.attach("run-1") == handles
    ours.cancel_run("run-1")
    assert {job["TrainingJobStatus"] for job in aws.jobs.values()} <= {"Stopping", "Stopped"}
    for handle in handles:
        aws.move(name(handle), "Stopped", "Stopped")
    ours.purge(handles[0])
    assert aws.jobs == {}


def test_an_interrupted_purge_is_gone_on_with_by_every_handle(aws, executor):
    ours = executor()
    handles = ours.launch_replicas(3, "trainer:train", run_id="run-1")
    for handle in handles:
        aws.move(name(handle), "Completed", "Completed")
    for left, asked in ((0, 1), (0, 2)):  # the first is created first, and the others in any order
        jobs = dict(aws.jobs)
        for handle in handles:
            if handle.rank != left:
                del aws.jobs[name(handle)]
        executor().purge(handles[asked])
        assert aws.jobs == {}
        aws.jobs.update(jobs)
    # Of a later run of the name this could be what is left, too.
    del aws.jobs[name(handles[0])]
    with pytest.raises(BackendError, match=r"0000[12], of the same run or .* attach\('run-1'\)"):
        executor().purge(handles[0])
    executor().purge(executor().attach("run-1")[0])
    assert aws.jobs == {}


def test_a_purge_waits_for_what_is_going(aws, executor):
    """Its own job went first, and the answer to that was lost; the others need only time."""
    ours = executor()
    handles = ours.launch_replicas(3, "trainer:train", run_id="run-1")
    for handle in handles:
        aws.move(name(handle), "Deleting", "Completed")
    del aws.jobs[name(handles[0])]
    object.__setattr__(ours._backoff, "sleep", lambda _: aws.jobs.clear())
    ours.purge(handles[0])
    assert aws.jobs == {}


def test_a_purge_removes_a_job_that_the_list_has_whatever_describe_says(aws, executor, run):
    ours = executor()
    fault = ("DescribeTrainingJob", "ValidationException", "Requested resource not found.", 400)
    aws.faults.append((*fault, False))
    with pytest.raises(InvalidRequestError, match="have not ended"):
        ours.purge(run[0])
    for handle in run:
        aws.move(name(handle), "Completed", "Completed")
    aws.faults.append((*fault, False))
    ours.purge(run[0])
    assert aws.jobs == {}


NOT_FOUND = ("ValidationException", "Requested resource not found.", 400, False)


@pytest.fixture
def young(aws, executor):
    """An executor of whose clock all jobs have just been created, and a run of four."""
    ours = executor(clock=lambda: aws.now)
    return ours, ours.launch_replicas(4, "trainer:train", run_id="run-1")


def test_a_job_that_was_created_a_moment_ago_is_asked_for_again(aws, young):
    ours, handles = young
    unseen = ("DescribeTrainingJob", *NOT_FOUND)
    aws.faults.append(unseen)
    assert ours.poll(handles[0]) is PENDING
    aws.faults.append(unseen)
    found = ours.collect(handles[:2], timeout=0)
    assert [each["status"] for each in found] == ["pending", "pending"]
    aws.faults.append(unseen)
    ours.cancel(handles[0])
    aws.faults.append(("StopTrainingJob", *NOT_FOUND))
    ours.cancel(handles[1])
    assert all(ours.describe(each).stopping for each in handles[:2])
    assert aws.faults == []


@pytest.mark.parametrize("ahead", [-120, 120])
def test_who_has_launched_it_asks_again_whatever_its_clock_says(aws, executor, ahead):
    ours = executor(clock=lambda: aws.now + ahead)
    handles = ours.launch_replicas(2, "trainer:train", run_id="run-1")
    for verb in (ours.poll, ours.cancel):
        aws.faults.append(("DescribeTrainingJob", *NOT_FOUND))
        verb(handles[0])
    assert ours.describe(handles[0]).stopping


def test_what_is_not_there_for_half_a_minute_is_gone(aws, young):
    ours, handles = young
    begun = aws.now
    aws.jobs.clear()
    with pytest.raises(ReplicaNotFoundError):
        ours.describe(handles[0])
    assert 25 < aws.now - begun < 30 + 20 + 1  # the longest pause
    aws.sleep(1)  # the others were created a little later
    ours.cancel(handles[1])
    assert {each["reason"] for each in ours.collect(handles, timeout=0)} == {"lost"}


def test_what_was_purged_here_is_gone_at_once(aws, young):
    ours, handles = young
    for handle in handles:
        aws.move(name(handle), "Completed", "Completed")
    ours.purge(handles[0])
    begun = aws.now
    with pytest.raises(ReplicaNotFoundError):
        ours.describe(handles[1])
    assert not ours.exists("run-1")
    assert aws.now - begun < 5


@pytest.mark.sampled
@pytest.mark.parametrize("verb", ["attach", "exists", "cancel_run"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_run_that_was_launched_a_moment_ago_is_found_whole(aws, young, verb, times):
    ours, handles = young
    aws.lists_lag = True
    aws.faults += [("DescribeTrainingJob", *NOT_FOUND)] * times
    found = getattr(ours, verb)("run-1")
    assert found == {"attach": handles, "exists": True, "cancel_run": None}[verb]
    if verb == "cancel_run":
        assert {job["TrainingJobStatus"] for job in aws.jobs.values()} == {"Stopping"}


@pytest.mark.parametrize("operation", ["ListTrainingJobs", "Search"])
def test_no_run_is_gone_where_nothing_was_asked_for_by_name(aws, executor, operation):
    handles = executor().launch_replicas(3, "trainer:train", run_id="run-1")
    ours = executor(retry_timeout=0)
    fault = (operation, "ValidationException", "Requested resource not found.", 400, False)
    for look in (lambda: ours.exists("run-1"), lambda: ours.collect(handles, timeout=0)):
        aws.faults.append(fault)
        with pytest.raises(UnavailableError, match="not AWS's own"):
            look()
    assert ours.exists("run-1")


def test_what_a_create_does_not_find_is_something_that_it_names(aws, executor):
    text = "Could not find the training plan"
    aws.faults.append(("CreateTrainingJob", "ValidationException", text, 400, False))
    with pytest.raises(InvalidRequestError, match=text):
        executor().launch_replicas(1, "trainer:train", run_id="run-1")


def test_a_handle_of_an_earlier_run_of_the_name_purges_nothing(aws, executor):
    handles = executor().launch_replicas(3, "trainer:train", run_id="run-1")
    aws.jobs.clear()
    aws.now += 60
    executor().launch_replicas(3, "trainer:train", run_id="run-1")
    del aws.jobs[name(handles[2])]  # as if it were not created yet
    for job in list(aws.jobs):
        aws.move(job, "Completed", "Completed")
    with pytest.raises(BackendError, match=r"attach\('run-1'\)"):
        executor().purge(handles[2])
    assert len(aws.jobs) == 2


def test_logs(aws, executor, run):
    assert executor().stream_logs(run[0]) == ""
    begun = int(aws.now)
    for number in (1, 2):
        aws.logs[f"{name(run[0])}/algo-1-{begun + number}"] = [
            (1000 * (begun + number), f"attempt {number} line {line}") for line in range(5)
        ]
    aws.logs[f"{name(run[1])}/algo-1-{begun}"] = [(begun * 1000, "of another")]
    ours = executor()
    assert len(list(ours.log_iter(run[0]))) == 10
    assert ours.stream_logs(run[0], n_lines=3).splitlines() == [
        f"attempt 2 line {n}" for n in (2, 3, 4)
    ]
    assert len(ours.stream_logs(run[0], n_lines=7).splitlines()) == 7
    assert list(ours.log_iter(run[0], regex="2 line 4")) == ["attempt 2 line 4"]
    assert len(list(ours.log_iter(run[0], since=float(begun + 2)))) == 5
    aws.move(name(run[0]), "Stopped", "Stopped")
    assert len(list(ours.log_iter(run[0], follow=True))) == 10


def test_an_index_that_lags_is_not_believed(aws, executor):
    handles = executor().launch_replicas(6, "trainer:train", run_id="run-1")
    old = [{"TrainingJob": dict(job)} for job in aws.jobs.values()]
    aws.Search = lambda body: {"Results": old}
    for handle in handles:
        aws.move(name(handle), "Failed", "Failed", FailureReason="AlgorithmError: , exit code: 1")
    assert {each["status"] for each in executor().collect(handles, timeout=0)} == {"failed"}
    assert aws.count("DescribeTrainingJob") == 6
