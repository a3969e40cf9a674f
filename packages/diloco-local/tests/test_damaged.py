"""Whatever a run's files hold, verbs answer or raise our errors: a replica can write there too."""

import json
import os
import tracemalloc
from dataclasses import asdict, replace

import pytest
from local_lab import ended_run, results_of, run_of

from diloco_local import LocalProcessExecutor, _observe
from diloco_local._files import open_lock, try_lock
from diloco_local._processes import ProcessId
from diloco_local._record import AttemptState
from diloco_protocol import BackendError, ReplicaState
from diloco_protocol.backend import OUTCOME_BYTES, RECORD_BYTES

pytestmark = pytest.mark.processes

FILES = ("run.json", "final.json", "state.json", "cancel.json", "outcome.json", "times.jsonl")
VALUES = (None, True, -1, 1.5, 1e300, 10**400, "text", "", [], [1], {}, {"at": "soon"}, "\ud800")
BYTES = (b"", b"{", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b"{}\n{}")


class Unwatched(LocalProcessExecutor):
    """Starts no supervisors."""

    _supervise = staticmethod(lambda *_, **__: None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has ended, with every file that a run can have."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "trainer.py").write_text("def echo(**kwargs):\n    print('echo', flush=True)\n")
    executor = LocalProcessExecutor(root=folder / "state", pythonpath=[folder])
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    place = run_of(handle)
    place.replica(0).cancel.write_text('{"at": 1.5, "by": 3}')
    return Unwatched(root=folder / "state"), handle, place.path


def answers(run, *, ended=True):
    """Calls every verb; what they raise is one of ours.

    ``purge`` comes last and is kept from doing anything.
    """
    executor, handle, _ = run
    final = run_of(handle).replica(0).final
    kept = final.read_bytes()
    if not ended:
        final.unlink()
    verbs = (
        lambda: executor.describe(handle),
        lambda: executor.collect([handle], timeout=0),
        lambda: executor.stream_logs(handle),
        lambda: list(executor.log_iter(handle, since=1.0)),
        lambda: executor.attach(handle.run_id),
        executor.list_runs,
        lambda: executor.cancel(handle) if ended else None,
    )
    raised = []
    try:
        for verb in verbs:
            try:
                verb()
            except BackendError as error:
                raised.append(error)
    finally:
        final.write_bytes(kept)
    return raised


@pytest.fixture
def file(run, request):
    """One of the files, which is as it was when the test is over."""
    path = next(run[2].rglob(f"*{request.param}"))
    kept = path.read_bytes()
    yield path
    path.write_bytes(kept)


# A run that has not ended has no final.json.
CASES = [
    (file, ended) for file in FILES for ended in (True, False) if ended or file != "final.json"
]


@pytest.mark.sampled
@pytest.mark.parametrize(("file", "ended"), CASES, indirect=["file"])
@pytest.mark.parametrize("data", BYTES, ids=lambda data: repr(data[:8]))
def test_other_bytes(run, file, data, ended):
    file.write_bytes(data)
    answers(run, ended=ended)


def places(value, above=()):
    """All places in a JSON value, from the outside to the inside."""
    yield above
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield from places(each, (*above, key))


def replaced(value, place, new):
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


@pytest.mark.sampled
@pytest.mark.parametrize(("file", "ended"), CASES, indirect=["file"])
def test_other_values_anywhere(run, file, ended, monkeypatch):
    monkeypatch.setattr(_observe, "members", lambda *_: {})  # the table of processes takes long
    first = file.read_text().splitlines()[0]
    original = json.loads(first)
    for place in places(original):
        for value in VALUES:
            file.write_text(json.dumps(replaced(original, place, value)))
            answers(run, ended=ended)


@pytest.mark.parametrize("file", ["run.json"], indirect=True)
def test_what_is_wrong_is_said_with_the_file(run, file):
    file.write_text(json.dumps({**json.loads(file.read_text()), "grace": "long"}))
    raised = answers(run)
    assert any(str(file) in str(error) for error in raised)
    assert run[0].list_runs() == [run[1].run_id]


@pytest.mark.parametrize("data", BYTES, ids=lambda data: repr(data[:8]))
def test_a_launch_under_the_name_of_a_damaged_run_is_refused(tmp_path, data):
    run_of(ended_run(tmp_path)).record.write_bytes(data)
    with pytest.raises(BackendError, match=r"run\.json"):
        Unwatched(root=tmp_path).launch_replicas(1, "nobody_has:it", {}, run_id="ended")


@pytest.mark.parametrize(
    ("field", "value"),
    [("run_id", "another"), ("world_size", 0), ("world_size", 1 << 40), ("world_size", 10_001),
     ("ranks", [0, 0]), ("uid", "\ud800"), ("uid", "\0"), ("uid", ""), ("grace", float("nan")),
     ("grace", -1), ("timeout", 0), ("timeout", -1), ("timeout", float("nan")),
     ("timeout", 10**400), ("created_at", 10**400), ("created_at", float("inf"))],
)  # fmt: skip
def test_a_record_that_leads_elsewhere_is_refused(tmp_path, field, value):
    ended_run(tmp_path, "another")
    record = run_of(ended_run(tmp_path)).record
    record.write_text(json.dumps({**json.loads(record.read_text()), field: value}))
    with pytest.raises(BackendError, match=rf"{record} does not hold"):
        Unwatched(root=tmp_path).attach("ended")


def test_an_end_that_is_no_end_does_not_count(tmp_path):
    handle = ended_run(tmp_path)
    final = run_of(handle).replica(0).final
    final.write_text(json.dumps({**json.loads(final.read_text()), "state": "running"}))
    status = Unwatched(root=tmp_path).describe(handle)
    assert status.state is ReplicaState.SUCCEEDED  # as its outcome says
    assert "'running' is no end" in status.message


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("started_at", value) for value in (-1.0, 1e300, 10**400, float("nan"), "5", True)),
        *(("stop", {"reason": "timeout", "at": value}) for value in (-1.0, 1e300, "5", None)),
        ("stop", {"reason": "error", "at": 1.0}),
        ("attempt", 1 << 40),
        ("deadline", -1.0),
        ("runner", {"pid": 0, "start": "", "boot": "", "namespace": ""}),
    ],
)
def test_a_state_that_no_supervisor_writes_does_not_count(tmp_path, field, value):
    handle = ended_run(tmp_path)
    replica = run_of(handle).replica(0)
    replica.final.unlink()
    good = asdict(AttemptState(attempt=1, started_at=1.0))
    replica.state.write_text(json.dumps(good))
    assert Unwatched(root=tmp_path).describe(handle).started_at == 1.0
    replica.state.write_text(json.dumps({**good, field: value}))
    assert Unwatched(root=tmp_path).describe(handle).started_at is None
    replica.attempt(1).outcome.unlink()
    (entry,) = Unwatched(root=tmp_path).collect([handle], timeout=0)
    assert (entry["status"], entry["attempt"]) == ("failed", 1)
    assert f"{replica.state} does not hold" in entry["error"]


def test_a_cancel_reaches_what_nobody_can_describe(tmp_path):
    handle = ended_run(tmp_path)
    run = run_of(handle)
    run.replica(0).final.unlink()
    run.replica(0).state.write_text("damaged")
    lock = open_lock(run.lock)
    assert try_lock(lock)  # as a supervisor does
    supervised = []

    class Watched(LocalProcessExecutor):
        _supervise = staticmethod(lambda run, *_, **__: supervised.append(run))

    executor = Watched(root=tmp_path)
    executor.cancel(handle)
    status = executor.describe(handle)
    assert (status.state, status.stopping) == (ReplicaState.RUNNING, True)
    assert "is not JSON" in status.message
    os.close(lock)
    assert executor.poll(handle) is ReplicaState.SUCCEEDED  # by its outcome, if nobody watches
    assert supervised == []


def test_what_was_left_unwatched_is_ended_whatever_its_state_says(waiting, until):
    run = waiting()
    files = run_of(run.handle)
    watchers = json.loads((files.path / "supervisor.json").read_text())
    for key in ("parent", "supervisor"):
        process = ProcessId.of(watchers[key])
        process.send(9)
        until(lambda process=process: not process.alive())
    files.replica(0).state.write_text('{"known": 5}')
    replica = ProcessId.of(run.pid())
    run.executor.cancel(run.handle)
    (result,) = results_of(run.executor, run.handles)
    assert (result["status"], replica.alive()) == ("cancelled", False)
    assert "does not hold" in files.log.read_text()


class Ranks:
    """A run of two replicas that have ended; the files of rank 0 are damaged by the test."""

    def __init__(self, folder):
        self.executor = Unwatched(root=folder)
        self.handles = [ended_run(folder, ranks=2)]
        self.handles.append(replace(self.handles[0], rank=1))
        self.files = run_of(self.handles[0]).replica(0)

    def entry(self):
        """That of rank 0; that of rank 1 is as ever, and every other verb answers for both."""
        for handle in self.handles:
            self.executor.describe(handle)
            self.executor.cancel(handle)
        entry, other = self.executor.collect(self.handles, timeout=0)
        assert (other["status"], other["result"], other["error"]) == ("succeeded", 3, None)
        return entry


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path / "state")


#: What no end of a replica can say.
IMPOSSIBLE = [
    *(("exit_code", value) for value in (-1, 256, 4242, 1 << 40, True, "0", 1.5)),
    *(("attempt", value) for value in (0, -1, 1 << 40)),
    *((name, value) for name in ("started_at", "finished_at") for value in (-1, 1e15, "now")),
    ("signal", 5),
    ("reason", "no_such_reason"),
    ("reason", "preempted"),
    ("version", 99),
]
#: And what only an outcome has, or cannot say.
OF_OUTCOMES = [("version", 99), ("reason", "preempted")]


@pytest.mark.sampled
@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_a_damaged_outcome_concerns_one_rank(ranks, field, value):
    outcome = ranks.files.attempt(1).outcome
    outcome.write_text(json.dumps({**json.loads(outcome.read_text()), field: value}))
    entry = ranks.entry()
    assert (entry["status"], entry["result"]) == ("succeeded", None)  # as its end says
    assert entry["error"].startswith("the result is lost: the outcome that the runner reported")
    ranks.files.final.unlink()
    entry = ranks.entry()
    assert (entry["status"], entry["exit_code"]) == ("failed", None)
    assert "cannot be read" in entry["error"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("field", "value"),
    [case for case in IMPOSSIBLE if case not in OF_OUTCOMES] + [("state", "lost")],
)
def test_a_damaged_end_concerns_one_rank(ranks, field, value):
    final = ranks.files.final
    final.write_text(json.dumps({**json.loads(final.read_text()), field: value}))
    entry = ranks.entry()
    assert (entry["status"], entry["result"]) == ("succeeded", 3)  # as its outcome says
    ranks.files.attempt(1).outcome.unlink()
    entry = ranks.entry()
    assert (entry["status"], entry["exit_code"]) == ("failed", None)
    assert str(final) in entry["error"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "most"), [("outcome", OUTCOME_BYTES), ("final", RECORD_BYTES), ("state", RECORD_BYTES)]
)
def test_a_file_of_any_size_takes_bounded_memory(ranks, name, most):
    files = ranks.files.attempt(1) if name == "outcome" else ranks.files
    if name == "state":
        ranks.files.final.unlink()
    with getattr(files, name).open("wb") as file:
        file.truncate(1 << 30)  # takes no room on the disk
    tracemalloc.start()
    try:
        entry = ranks.entry()
        status = ranks.executor.describe(ranks.handles[0])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert entry["status"] == "succeeded"
    assert f"is larger than {most} bytes" in (entry["error"] or status.message or most_of(ranks))
    assert peak < 3 * OUTCOME_BYTES


def most_of(ranks):
    """What is said of a state that is not needed where the outcome is there."""
    ranks.files.attempt(1).outcome.unlink()
    return ranks.entry()["error"]


def test_a_record_of_any_size_is_refused(ranks):
    with run_of(ranks.handles[0]).record.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BackendError, match=f"is larger than {RECORD_BYTES} bytes"):
        ranks.executor.poll(ranks.handles[0])


@pytest.mark.parametrize("name", ["final", "state", "cancel"])
def test_something_else_in_the_place_of_a_file_concerns_one_rank(ranks, name):
    path = getattr(ranks.files, name)
    path.unlink(missing_ok=True)
    path.mkdir()
    assert ranks.entry()["result"] == 3
