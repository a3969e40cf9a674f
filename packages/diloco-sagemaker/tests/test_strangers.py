"""What others write under our names, or in our words, is believed only as far as it is ours."""

import gc
import json
import tracemalloc

import pytest
from scripted_aws import BUCKET, OPTIONS, AWSHarness

from diloco_protocol import (
    InvalidRequestError,
    Outcome,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    RunConflictError,
    outcome_to_message,
)
from diloco_protocol.backend import OUTCOME_BYTES, Recent

MEGABYTE = 1 << 20


@pytest.fixture
def world():
    harness = AWSHarness()
    try:
        yield harness
    finally:
        harness.close()


def launch(world, n=2, **options):
    executor = world.make_executor()
    return executor, executor.launch_replicas(n, "trainer:train", run_id="run-1", **options)


def create(world, name, strings=None):
    """Somebody creates a training job."""
    world.api.create_training_job(
        TrainingJobName=name,
        RoleArn=OPTIONS["role_arn"],
        AlgorithmSpecification={"TrainingImage": "any:1", "TrainingInputMode": "File"},
        OutputDataConfig={"S3OutputPath": "s3://bucket/other"},
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
        HyperParameters=strings or {},
    )


def ends(world, handle, content, **arguments):
    """A replica succeeds, and its outcome is this."""
    key = world.result_key(handle)
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=content, **arguments)
    job = world.of(handle)
    job.start()
    job.succeed()
    world.settle()


# --- jobs ---

STRANGERS = {
    "nothing of ours": lambda ours: {},
    "the run alone": lambda ours: {"DILOCO_RUN_ID": "run-1"},
    "a copy of one of ours": lambda ours: dict(ours),
    "a world of its own": lambda ours: {
        **ours, "DILOCO_RANKS": "0-7", "DILOCO_WORLD_SIZE": "8", "DILOCO_FINGERPRINT": "f" * 64,
    },
    "more ranks than a run can have": lambda ours: {
        **ours, "DILOCO_RANKS": "0-10000", "DILOCO_WORLD_SIZE": "10001",
        "DILOCO_FINGERPRINT": "f" * 64,
    },
    "numbers that are none": lambda ours: {
        **ours, "DILOCO_RANKS": f"0-{'9' * 2000}", "DILOCO_WORLD_SIZE": "٣",
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_foreign_job_with_the_name_of_a_rank_is_no_rank(world, kind, rank):
    executor, handles = launch(world, rank_offset=2, world_size=8)
    create(
        world,
        f"diloco-run-1-{rank:05d}",
        STRANGERS[kind](world.of(handles[0]).json["HyperParameters"]),
    )
    fresh = world.make_executor()
    assert fresh.attach("run-1") == handles
    assert fresh.list_runs() == ["run-1"]
    if kind != "a world of its own":  # that one says that it is a launch of ours
        again = fresh.launch_replicas(
            2, "trainer:train", run_id="run-1", rank_offset=2, world_size=8
        )
        assert again == handles
    fresh.cancel_run("run-1")
    world.settle()
    alive = [job.name for job in world.world.jobs() if job.status[0] == "InProgress"]
    assert alive == [f"diloco-run-1-{rank:05d}"]
    executor.purge(handles[0])
    assert [job.name for job in world.world.jobs()] == alive
    if kind != "a world of its own":
        assert fresh.list_runs() == []
        with pytest.raises(ReplicaNotFoundError, match="no run 'run-1'"):
            fresh.attach("run-1")


def test_a_launch_does_not_take_a_foreign_job_for_a_rank(world):
    create(world, "diloco-run-1-00001")
    with pytest.raises(RunConflictError, match="not launched by diloco"):
        launch(world)
    assert [job.name for job in world.world.jobs()] == ["diloco-run-1-00001"]


def test_what_strangers_say_of_their_jobs_is_not_kept(world):
    """Training jobs stay in an account for ever."""
    launch(world, 1)
    for number in range(20):
        ours = {"DILOCO_RUN_ID": f"s{number}", "DILOCO_RANKS": "0-0", "DILOCO_WORLD_SIZE": "1"}
        words = {f"k{key}": "x" * 2400 for key in range(40)}
        create(world, f"diloco-s{number}-00000", {**ours, "DILOCO_FINGERPRINT": "f" * 64, **words})
    executor = world.make_executor()
    executor.attach("run-1")  # clients and models of services are loaded by now
    tracemalloc.start()
    try:
        assert len(executor.list_runs()) == 21
        world.stand_in.calls.clear()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < MEGABYTE  # they have told 1.9 MB
    finally:
        tracemalloc.stop()


def test_of_many_jobs_the_latest_are_remembered():
    recent = Recent(2)
    for number in (1, 2, 1, 3):
        recent.keep(number, str(number))
    assert [recent.get(number) for number in (1, 2, 3)] == ["1", None, "3"]
    recent.forget(3)
    recent.forget(2)
    assert (3 in recent, 1 in recent) == (False, True)


# --- results ---


@pytest.mark.parametrize("told", [True, False])
def test_an_outcome_that_is_too_large_is_not_read(aws, executor, monkeypatch, told):
    """Whether S3 tells how long it is or not; what is sent is counted."""
    handles = executor().launch_replicas(2, "trainer:train", run_id="run-1", max_restarts=1)
    for handle in handles:
        name = handle.metadata["job_name"]
        aws.objects[f"/bucket/runs/{name}/output/model/diloco-outcome.json"] = outcome()
        aws.move(name, "Completed", "Completed")
    handler = aws.server.RequestHandlerClass
    answer, sent = handler.do_GET, []

    def endless(self):
        if "-00001/" not in self.path:
            answer(self)
            return
        self.close_connection = True
        self.send_response(200)
        self.send_header("Last-Modified", self.date_time_string(aws.now))
        self.send_header("x-amz-request-id", "id")
        if told:
            self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        try:
            while len(sent) < 1 << 10:
                self.wfile.write(b" " * MEGABYTE)
                sent.append(MEGABYTE)
        except ConnectionError:
            pass  # nobody reads any more

    monkeypatch.setattr(handler, "do_GET", endless)
    states = [executor().describe(handle).state.value for handle in handles]
    assert states == ["succeeded", "succeeded"]
    results = executor().collect(handles, timeout=60)
    assert [each["result"] for each in results] == ["fine", None]
    assert f"larger than {OUTCOME_BYTES} bytes" in results[1]["error"]
    looks = 3  # of describe, and two of collect
    buffered = 16 * MEGABYTE  # on its way between the two
    assert sum(sent) < looks * (buffered if told else OUTCOME_BYTES + buffered)


def outcome(**changes):
    return json.dumps({**json.loads(Outcome(0, result="fine").to_json()), **changes}).encode()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "content",
    [
        outcome(exit_code=4242),
        outcome(exit_code=-1),
        outcome(exit_code=3),
        outcome(attempt=1 << 40),
        outcome(started_at=-1),
        outcome(finished_at=1e15),
        outcome(signal=5),
        outcome(reason="preempted"),
        b"[" * 100_000,
        b"9" * 100_000,
        b"\xff",
        b'{"version": 2}',
    ],
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_damaged_outcome_concerns_one_rank(world, content, restarts):
    executor, handles = launch(world, max_restarts=restarts)
    ends(world, handles[0], outcome())
    ends(world, handles[1], content)
    assert [executor.describe(each).state.value for each in handles] == ["succeeded", "succeeded"]
    results = executor.collect(handles, timeout=60)
    assert [each["result"] for each in results] == ["fine", None]
    assert results[0]["error"] is None
    assert "result is lost" in results[1]["error"]


def test_an_outcome_that_nobody_can_read_concerns_one_rank(world, monkeypatch):
    """Encrypted with a key of somebody's own, or moved to a class that must be restored first."""
    _, handles = launch(world, max_restarts=1)
    for handle in handles:
        ends(world, handle, outcome())
    answer = type(world.stand_in._api.s3).answer
    refusals = {
        "SSE-C": (400, "InvalidRequest"),
        "archived": (403, "InvalidObjectState"),
    }

    for status, code in refusals.values():

        def refuse(self, request, status=status, code=code):
            told = answer(self, request)
            if "-00001/" not in request.path or request.method != "GET":
                return told
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            return type(told)(status, body, "application/xml")

        monkeypatch.setattr(type(world.stand_in._api.s3), "answer", refuse)
        fresh = world.make_executor()
        assert [fresh.describe(each).state.value for each in handles] == ["succeeded"] * 2
        results = fresh.collect(handles, timeout=60)
        assert [each["result"] for each in results] == ["fine", None]
        assert code in results[1]["error"]


def test_an_outcome_that_is_older_than_its_job_is_of_another(world):
    """S3 says when it was written; what it says of itself may be anything."""
    executor, handles = launch(world, 1)
    created = world.of(handles[0]).json["CreationTime"]
    world.s3.put_object(
        Bucket=BUCKET, Key=world.result_key(handles[0]), Body=outcome(finished_at=created + 60)
    )
    backend = world.stand_in._api.s3
    with backend._world() as moto:
        key = moto.buckets[BUCKET].keys[world.result_key(handles[0])]
        key.last_modified = key.last_modified.replace(year=2025)
    job = world.of(handles[0])
    job.start()
    job.succeed()
    world.settle()
    (result,) = executor.collect(handles, timeout=60)
    assert (result["status"], result["result"]) == ("succeeded", None)
    assert "is older than the job" in result["error"]


# --- failures ---


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("AlgorithmError: exit code: 4242, exit code: 1", 1),
        ("AlgorithmError: exit code: 1 and so on", None),
        ("AlgorithmError: , exit code: 4242", None),
        ("AlgorithmError: , exit code: 256", None),
        ("AlgorithmError: , exit code: -9", None),
        (f"AlgorithmError: , exit code: {'9' * 900}", None),
        ("AlgorithmError: , exit code: 255", 255),
        ("AlgorithmError: , exit code: ٣", None),
        ('AlgorithmError: {"":' + "[" * 990, None),
        ("AlgorithmError: " + "{" * 1000, None),
        ("InternalServerError: We encountered an internal error, exit code: 7", None),
    ],
)
def test_an_exit_code_is_that_which_sagemaker_itself_says(world, reason, code):
    executor, handles = launch(world)
    job = world.of(handles[0])
    job.start()
    job.break_down(reason)
    world.settle()
    status = executor.describe(handles[0])
    assert (status.state.value, status.exit_code) == ("failed", code)
    results = executor.collect(handles, timeout=0)
    assert [each["status"] for each in results] == ["failed", "pending"]
    assert results[0]["exit_code"] == code


@pytest.mark.sampled
@pytest.mark.parametrize("words", ["", "ClientError: "])
@pytest.mark.parametrize("code", [3, 137, 143])
def test_memory_runs_out_only_where_sagemaker_says_so(world, code, words):
    """A program may write into its failure file what SageMaker says of one that had too little."""
    executor, handles = launch(world)
    job = world.of(handles[0])
    job.start()
    job.fail(code, f"{words}Please use an instance type with more memory, says the replica")
    world.settle()
    status = executor.describe(handles[0])
    assert (status.reason, status.exit_code) == ("error", code)


def test_a_report_of_another_exit_code_is_not_believed(world):
    executor, handles = launch(world)
    job = world.of(handles[0])
    job.start()
    job.fail(3, outcome_to_message(Outcome(7, reason=Reason.TIMEOUT, attempt=9))[0])
    world.settle()
    status = executor.describe(handles[0])
    assert (status.reason, status.exit_code, status.attempt) == ("error", 3, 1)


@pytest.mark.parametrize("started", [1.0, 253_402_300_799.0])
def test_a_start_when_there_was_no_job_is_not_believed(world, started):
    executor, handles = launch(world)
    job = world.of(handles[0])
    job.start()
    at = executor.describe(handles[0]).started_at
    told = Outcome(3, reason=Reason.ERROR, started_at=started)
    job.fail(3, outcome_to_message(told)[0])
    world.settle()
    assert executor.describe(handles[0]).started_at == at


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"exit_code": 4242},
        {"exit_code": -9},
        {"attempt": 1 << 40},
        {"started_at": -1},
        {"finished_at": 1e15},
        {"signal": 5},
        {"signal": "SIGNONE"},
        {"reason": "preempted"},
        {"reason": "lost"},
    ],
)
def test_a_report_that_cannot_be_is_no_report(world, changes):
    executor, handles = launch(world)
    text, _ = outcome_to_message(Outcome(3, error="no data"))
    job = world.of(handles[0])
    job.start()
    job.fail(3, json.dumps({**json.loads(text), **changes}))
    world.settle()
    status = executor.describe(handles[0])
    assert (status.state.value, status.reason, status.exit_code) == ("failed", Reason.ERROR, 3)
    assert (status.attempt, status.signal) == (1, None)
    assert [each["status"] for each in executor.collect(handles, timeout=0)] == [
        "failed",
        "pending",
    ]


# --- logs ---


def test_a_stream_that_is_older_than_the_job_is_of_another(world):
    """CloudWatch says when a stream was made; its name may say anything."""
    logs = world.stand_in._region.logs
    logs.write("diloco-run-1-00000/algo-1-9999999999", world.clock(), "of somebody else")
    world.advance(1000)
    executor, handles = launch(world)
    job = world.of(handles[0])
    job.start()
    job.log("of ours")
    assert executor.stream_logs(handles[0]) == "of ours"
    assert list(executor.log_iter(handles[0])) == ["of ours"]


# --- handles and words ---


@pytest.mark.sampled
@pytest.mark.parametrize(
    "created",
    [
        "9" * 5000, "9" * 16, "٣", "-1", "1e3", "launch-", "launch-xyz", f"launch-{'0' * 16}", "",
        "1\x1b[2J",
    ],
)  # fmt: skip
def test_a_handle_that_was_changed_is_refused(world, created):
    executor, handles = launch(world)
    data = json.loads(handles[0].to_json())
    data["metadata"]["created"] = created
    handle = ReplicaHandle.from_dict(data)
    for act in (executor.describe, executor.cancel, executor.purge, executor.stream_logs):
        with pytest.raises(InvalidRequestError, match="created") as caught:
            act(handle)
        assert len(str(caught.value)) < 500
        assert "\x1b" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="created"):
        executor.collect([handle], timeout=0)


def test_a_handle_of_the_last_moment_is_asked_for(world):
    executor, handles = launch(world, 3)
    data = json.loads(handles[0].to_json())
    for created in ("0", str(253_402_300_799_999)):
        data["metadata"]["created"] = created
        odd = [
            ReplicaHandle.from_dict(
                {**data, "rank": rank, "metadata": {**data["metadata"], "job_name": name}}
            )
            for rank, name in enumerate(each.metadata["job_name"] for each in handles)
        ]
        results = executor.collect(odd, timeout=0)
        assert {each["reason"] for each in results} == {"lost"}
