"""What strangers have put where we read: nothing of it is executed, everything is said or named."""

import base64
import json
import os
import pickle
import pickletools
from unittest.mock import AsyncMock, MagicMock

import modal
import pytest
from hypothesis import given
from hypothesis import strategies as st
from modal import _serialization
from modal.exception import InvalidError, PermissionDeniedError
from modal_proto import api_pb2

from diloco_localcloud._modal._workspace._call import Payload, Result, Status
from diloco_modal._client import _wire
from diloco_modal._state._decode import text_in_cbor, text_in_pickle
from diloco_modal._state._record import DamagedRecordError
from diloco_modal._wrapper import kept
from diloco_protocol import (
    BackendError,
    DilocoError,
    FolderJournal,
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    RunConflictError,
    UnavailableError,
)
from diloco_protocol.backend import OUTCOME_BYTES, RECORD_BYTES


class Bomb:
    """Makes a file where it is unpickled; it may be an exception there, too."""

    def __init__(self, path, then="None"):
        self.path, self.then = str(path), then

    def __reduce__(self):
        return eval, (f"[open({self.path!r}, 'w').close(), {self.then}][1]",)


@pytest.fixture
def bomb(tmp_path):
    """A hostile pickle; at the end nobody has unpickled it."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()  # it is one
    path.unlink()
    yield pickle.dumps(Bomb(path, "ValueError('of theirs')"), 4)
    assert not path.exists()


def end_with(lab, handle, *, data=b"", blob="", status="SUCCESS", form=1, **more):
    """A call ends with bytes of a container that is not ours."""
    call = lab.stand_in._workspace.calls.by_id(handle.metadata["function_call_id"])
    told = api_pb2.GenericResult(**more)
    with lab.stand_in._workspace.lock:
        payload = Payload(data, blob, form) if data or blob else None
        call.result = Result(Status[status], payload, "of theirs", "", told.SerializeToString())
        call.ended = lab.world.now()


VERBS = {
    "describe": lambda executor, handle: executor.describe(handle),
    "collect": lambda executor, handle: executor.collect([handle], timeout=1),
    "logs": lambda executor, handle: executor.stream_logs(handle),
    "attach": lambda executor, handle: executor.attach(handle.run_id),
    "exists": lambda executor, handle: executor.exists(handle.run_id),
    "list_runs": lambda executor, _: executor.list_runs(),
    "cancel": lambda executor, handle: executor.cancel(handle),
    "cancel_run": lambda executor, handle: executor.cancel_run(handle.run_id),
    "follow": lambda executor, handle: list(executor.log_iter(handle, follow=True)),
    "purge": lambda executor, handle: executor.purge(handle),
}


def try_all(lab, handle):
    """What each verb says, by an executor of its own: an error of ours, or None."""
    said = {}
    for name, verb in VERBS.items():
        said[name] = None
        try:
            verb(lab.executor(), handle)
        except DilocoError as error:
            said[name] = error
    return said


# --- what a call returns or raises ---

ENDS = {
    "a return value": {"status": "SUCCESS"},
    "an exception": {"status": "FAILURE"},
    "an exception at the start": {"status": "INIT_FAILURE"},
    "a value without a format": {"status": "SUCCESS", "form": 0},
    "an exception without a format": {"status": "FAILURE", "form": 0},
}


@pytest.mark.sampled
@pytest.mark.parametrize("end", ENDS)
def test_a_hostile_end_of_a_call(lab, bomb, end):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    end_with(lab, handle, data=bomb, **ENDS[end])
    status = lab.executor().describe(handle)
    raised = ENDS[end]["status"] != "SUCCESS"
    reason = Reason.START_FAILED if raised else Reason.ERROR
    assert (status.state, status.reason) == ("failed", reason)
    assert not any(try_all(lab, handle).values())


def test_a_hostile_traceback(lab, bomb):
    """Modal's client unpickles it only with an exception; both are here."""
    (handle,) = lab.launch(1)
    lab.begin(handle)
    data = pickle.dumps(ValueError("x"), 4)
    end_with(lab, handle, data=data, status="FAILURE", serialized_tb=bomb, tb_line_cache=bomb)
    assert lab.executor().describe(handle).message == "of theirs"
    assert not any(try_all(lab, handle).values())


def test_a_hostile_result_in_a_bucket(lab, bomb):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.stand_in._workspace.blobs["bl-x"] = bomb
    end_with(lab, handle, blob="bl-x")
    assert lab.executor().poll(handle) == "failed"


def test_what_one_rank_returns_is_no_matter_to_the_others(lab, bomb):
    handles = lab.launch(3)
    for handle in handles:
        lab.begin(handle)
    lab.finish(handles[0], 0)
    end_with(lab, handles[1], data=bomb)
    lab.finish(handles[2], 2)
    results = lab.executor().collect(handles, timeout=10)
    assert [each["status"] for each in results] == ["succeeded", "failed", "succeeded"]
    assert [each["result"] for each in results] == [0, None, 2]


@pytest.mark.parametrize("where", ["inline", "blob"])
def test_a_result_that_is_too_large_is_not_read(lab, monkeypatch, where):
    """And the record's word counts, if it has one."""
    monkeypatch.setattr(_wire, "OUTCOME_BYTES", 1000)
    handles = lab.launch(2)
    for handle in handles:
        lab.begin(handle)
        data = pickle.dumps(lab.outcome("a" * 2000), 4)
        lab.stand_in._workspace.blobs["bl-x"] = data
        end_with(lab, handle, **({"data": data} if where == "inline" else {"blob": "bl-x"}))
    end = {"started": 1, "failed": 0, "at": lab.world.now(), "outcome": lab.outcome(7)}
    lab.record().put("end-0-1", end)
    first, second = lab.executor().collect(handles, timeout=10)
    assert (first["status"], first["result"]) == ("succeeded", 7)
    assert (second["status"], second["reason"]) == ("failed", "error")
    assert "what it returned is larger than 1064 bytes, and is not read" in second["error"]


def ended_with_a_blob(lab, handle, outcome):
    """Its wrapper has written its end into the record, and the bucket may have what it returned."""
    lab.begin(handle)
    end = {"started": 1, "failed": 0, "at": lab.world.now(), "again": False}
    lab.record().put(f"end-{handle.rank}-1", {**end, "outcome": outcome and kept(outcome)})
    lab.stand_in._workspace.blobs[f"bl-{handle.rank}"] = pickle.dumps(outcome, 4)
    end_with(lab, handle, blob=f"bl-{handle.rank}")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "refusal",
    [PermissionDeniedError("not yours"), InvalidError("no id"), None],
    ids=["not ours", "no id", "gone"],
)
def test_a_large_result_that_is_refused_concerns_its_rank_alone(lab, monkeypatch, refusal):
    handles = lab.launch(4)
    for handle, outcome in zip(
        handles, [lab.outcome(7), lab.outcome("x" * 9000), ""], strict=False
    ):
        ended_with_a_blob(lab, handle, outcome)
    lab.begin(handles[3])
    lab.finish(handles[3], "whole")
    lab.stand_in._workspace.blobs.clear()
    if refusal is not None:
        refuse = AsyncMock(side_effect=refusal)
        monkeypatch.setattr(_wire, "_download", refuse)
    executor = lab.executor()
    results = executor.collect(handles, timeout=10)
    assert [each["status"] for each in results] == ["succeeded"] * 2 + ["failed", "succeeded"]
    assert [each["result"] for each in results] == [7, None, None, "whole"]
    why = "Blob with ID" if refusal is None else str(refusal)
    assert all(why in each["error"] for each in results[1:3])
    assert lab.executor().describe(handles[0]).state == "succeeded"
    lab.executor().purge(handles[3])
    assert executor.list_runs() == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("status", "passes"), [(403, False), (404, False), (408, True), (429, True), (503, True)]
)
def test_what_a_bucket_refuses_is_lost_and_what_may_pass_is_not(lab, monkeypatch, status, passes):
    (handle,) = lab.launch(1)
    ended_with_a_blob(lab, handle, "")
    session = MagicMock()
    session.get.return_value.__aenter__.return_value.status = status
    monkeypatch.setattr(_wire.ClientSessionRegistry, "get_session", lambda: session)
    words = f"its result could not be fetched: HTTP {status}"
    if passes:
        with pytest.raises(UnavailableError, match=words):
            lab.executor().describe(handle)
    else:
        assert words in lab.executor().describe(handle).message


def test_a_late_result_whose_end_the_record_lacks_hides_no_other_rank(lab, monkeypatch):
    handles = lab.launch(2)
    ended_with_a_blob(lab, handles[0], "")
    lab.begin(handles[1])
    lab.finish(handles[1], "whole")
    with monkeypatch.context() as away:
        away.setattr(_wire, "_download", AsyncMock(side_effect=UnavailableError("HTTP 503")))
        executor = lab.executor()
        assert executor.collect(handles[1:])[0]["result"] == "whole"
        with pytest.raises(UnavailableError, match="HTTP 503"):
            executor.describe(handles[0])
        results = lab.executor().collect(handles, timeout=0)
        assert [each["status"] for each in results] == ["running", "succeeded"]
        with pytest.raises(InvalidRequestError, match="have not ended, such as rank 0"):
            lab.executor().purge(handles[1])
    assert lab.executor().describe(handles[0]).state.terminal


def test_a_large_result_that_is_away_for_now_concerns_its_rank_alone(lab, monkeypatch, tmp_path):
    handles = lab.launch(2)
    ended_with_a_blob(lab, handles[0], lab.outcome("x" * 9000))
    lab.begin(handles[1])
    lab.finish(handles[1], "whole")
    with monkeypatch.context() as away:
        away.setattr(_wire, "_download", AsyncMock(side_effect=UnavailableError("HTTP 503")))
        executor = lab.executor()
        assert executor.describe(handles[0]).state == "succeeded"
        assert executor.collect(handles[1:], timeout=1)[0]["result"] == "whole"
        with pytest.raises(UnavailableError, match=r"rank 0 .*HTTP 503"):
            executor.collect(handles, timeout=1)
        with pytest.raises(UnavailableError) as caught:
            lab.executor(journal=FolderJournal(tmp_path)).purge(handles[0])
        assert "run 'run' is not removed" in caught.value.__notes__[0]
    results = executor.collect(handles, timeout=1)
    assert [each["result"] for each in results] == ["x" * 9000, "whole"]
    lab.executor().purge(handles[0])


@pytest.mark.parametrize("form", ["pickle", "cbor"])
def test_a_result_arrives_in_every_format_of_modal(lab, form):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    text = lab.outcome({"é": "x" * 400}).encode()
    cbor = b"\x79" + len(text).to_bytes(2, "big") + text
    data, number = (cbor, 4) if form == "cbor" else (pickle.dumps(text.decode(), 4), 1)
    assert api_pb2.DATA_FORMAT_CBOR == 4
    end_with(lab, handle, data=data, form=number)
    (result,) = lab.executor().collect([handle], timeout=10)
    assert result["result"] == {"é": "x" * 400}


# --- entries of a Dict ---


def hostile_dict(lab, entries):
    """A Dict of the run's name, whose bytes somebody has sent past Modal's client."""
    workspace = lab.stand_in._workspace
    with workspace.lock:
        place = workspace.environments[0]
        held = workspace.dicts.named(place, "diloco-run") or workspace.dicts.create(
            place, "diloco-run"
        )
        for key, value in entries:
            workspace.dicts.put(held.dict_id, key, value)


def key(name):
    return pickle.dumps(name, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["launch", "another", "key", "key and launch"])
def test_a_hostile_dict_of_a_name_that_no_run_has(lab, bomb, where):
    (handle,) = lab.launch(1)
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    lab.call(handle).stop()
    entries = {
        "launch": [(key("launch"), bomb)],
        "another": [(key("weights"), bomb)],
        "key": [(bomb, bomb)],
        "key and launch": [(bomb, bomb), (key("launch"), bomb), (key("call-0"), bomb)],
    }[where]
    hostile_dict(lab, entries)
    said = try_all(lab, handle)
    kinds = (DamagedRecordError, ReplicaNotFoundError)
    assert all(isinstance(said[verb], kinds) for verb in ("describe", "logs", "attach"))
    assert all(error is None or isinstance(error, kinds) for error in said.values())
    with pytest.raises(RunConflictError, match="is not the record of a run"):
        lab.launch(1)
    assert len(lab.world.calls()) == 1


ENTRIES = ["call-0", "life-0-1", "end-0-1", "attempt-0-2", "cancel-0", "over-0", "weights"]


@pytest.mark.parametrize(
    "entry",
    [
        "call-0",
        "cancel-0",
        "launch",
        "a key",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ENTRIES if each[0] not in "c"),
    ],
)
def test_a_hostile_entry_in_the_record_of_a_run(lab, bomb, entry):
    handles = lab.launch(2)
    for handle in handles:
        lab.begin(handle)
    lab.finish(handles[1], 1)
    other = lab.executor()
    assert other.poll(handles[1]) == "succeeded"
    hostile_dict(lab, [(bomb if entry == "a key" else key(entry), bomb)])
    if entry == "launch":
        with pytest.raises(RunConflictError, match="is not the record of a run"):
            lab.launch(2)
    else:
        assert lab.executor().collect(handles[1:], timeout=1)[0]["result"] == 1
    said = try_all(lab, handles[0])
    assert all(error is None or f"the entry '{entry}'" in str(error) for error in said.values())
    if entry not in {"launch", "call-0"}:
        assert said == dict.fromkeys(VERBS)
    assert lab.call(handles[0]).status in {"terminated", "timeout"} or entry == "call-0"


@pytest.mark.sampled
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_damaged_rank_is_seen_to_its_end(lab, bomb, entry):
    """From what its call says; the others are collected with it."""
    handles = lab.launch(2)
    for handle in handles:
        lab.begin(handle)
    hostile_dict(lab, [(key(entry), bomb)])
    executor = lab.executor()
    status = executor.describe(handles[0])
    assert status.state == "running"
    assert (f"the entry '{entry}' of the run's record" in status.message) == (entry != "weights")
    lab.finish(handles[0], 0)
    lab.finish(handles[1], 1)
    results = executor.collect(handles, timeout=10)
    assert [each["result"] for each in results] == [0, 1]


def test_a_record_that_is_too_large_is_not_read(lab, monkeypatch):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    monkeypatch.setattr(_wire, "_DICT_BYTES", 20_000)
    hostile_dict(lab, [(key(f"weights-{number}"), b"x" * 100) for number in range(100)])
    words = "record on Modal has more than 20000 bytes"
    for verb in ("describe", "collect", "attach", "purge"):
        with pytest.raises(DamagedRecordError, match=words):
            VERBS[verb](lab.executor(), handle)
    call = handle.metadata["function_call_id"]
    with pytest.raises(
        BackendError, match=f"{words}.* has not ended, and may cost money: .*{call}"
    ):
        lab.executor().cancel(handle)


def test_the_bounds_are_those_of_the_protocol():
    assert OUTCOME_BYTES == _wire.OUTCOME_BYTES
    assert _wire._DICT_BYTES == 8 * RECORD_BYTES


# --- forged handles ---


def test_a_forged_handle_of_another_apps_call(lab, bomb):
    """Nobody's result is fetched, nothing is ended, and it is said what lives."""
    lab.world.deploy("other", ["function"])
    function = modal.Function.from_name("other", "function", client=lab.client)
    theirs = function.spawn().object_id
    (handle,) = lab.launch(1)
    forged = ReplicaHandle.from_dict(
        {
            **handle.to_dict(),
            "run_id": "another",
            "metadata": {**handle.metadata, "function_call_id": theirs},
        }
    )
    for each in (forged, ReplicaHandle.from_dict({**forged.to_dict(), "run_id": "run"})):
        for verb in ("describe", "logs", "follow"):
            with pytest.raises(ReplicaNotFoundError):
                VERBS[verb](lab.executor(), each)
        for verb in ("purge", "cancel"):
            with pytest.raises(BackendError, match=f"has not ended.* may cost money: .*{theirs}"):
                getattr(lab.executor(), verb)(each)
    assert lab.world.call(theirs).status == "pending"
    lab.stand_in._workspace.blobs["bl-x"] = bomb
    end_with(lab, forged, blob="bl-x")
    before = len(lab.stand_in.calls.requests())
    lab.executor().cancel(forged)
    verbs = {call.verb for call in lab.stand_in.calls.requests()[before:]}
    assert "BlobGet" not in verbs


@pytest.mark.sampled
@pytest.mark.parametrize("call", ["", "no id", "fc-\x1b[31m\x07", "fc-" + "9" * 5000, "fc-\ud800"])
def test_a_handle_that_names_no_call(lab, call):
    (handle,) = lab.launch(1)
    data = handle.to_dict()
    data["metadata"]["function_call_id"] = call
    try:
        forged = ReplicaHandle.from_dict(data)
    except DilocoError:
        return
    said = try_all(lab, forged)
    assert isinstance(said["describe"], ReplicaNotFoundError)
    assert not any("\x1b" in str(error) for error in said.values())


# --- reading texts ---

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.integers(0, 70_000).map("é".__mul__)


@given(TEXTS, st.integers(1, pickle.HIGHEST_PROTOCOL))
def test_a_text_is_read_as_it_was_written(text, protocol):
    assert text_in_pickle(pickle.dumps(text, protocol)) == text


@given(st.binary() | st.binary().map(lambda end: pickle.dumps("a", 4)[:-1] + end))
def test_no_bytes_do_any_harm(data):
    text, cbor = text_in_pickle(data), text_in_cbor(data)
    if text is not None:
        codes = {code.name for code, _, _ in pickletools.genops(data)}
        assert pickle.loads(data) == text
        assert not codes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "BUILD"}
    assert cbor is None or isinstance(cbor, str)


@pytest.mark.parametrize(
    "value",
    [None, 1, b"a", ["a"], ("a",), {"a": "b"}, os.getcwd, "\ud800", "a" * 3 + "\udfff"],
)
def test_what_is_no_text_is_none(value):
    assert text_in_pickle(pickle.dumps(value, 4)) is None


def test_pickles_that_are_data_and_grow():
    """Nesting, and pieces that are taken from the memo again and again."""
    deep = b"\x80\x04" + b"(l" * 100_000 + b"."
    doubled = b"\x80\x04]q\x00" + b"(h\x00h\x00lq\x00" * 60 + b"."
    long_int = b"I" + b"9" * 100_000 + b"\n."
    twice = b"\x80\x04\x8c\x01a\x8c\x01b."
    behind = pickle.dumps("a", 4) + b"more"
    lying = b"\x80\x04X\xff\xff\xff\x7fa."
    padded = b"\x80\x04" + b"\x94" * 1_000_000 + b"\x8c\x01a."
    for data in (deep, doubled, long_int, twice, behind, lying, padded, b"", b"."):
        assert text_in_pickle(data) is None


def test_texts_in_cbor():
    """As RFC 8949 has them."""
    for encoded, text in (
        ("YA==", ""), ("YWE=", "a"), ("YsO8", "ü"), ("ZElFVEY=", "IETF"),
        (base64.b64encode(b"\x78\x18" + b"x" * 24).decode(), "x" * 24),
        (base64.b64encode(b"\x7a\x00\x01\x11\x70" + b"x" * 70_000).decode(), "x" * 70_000),
    ):  # fmt: skip
        data = base64.b64decode(encoded)
        assert text_in_cbor(data) == text
        assert text_in_cbor(data + b"a") is text_in_cbor(data[:-1] or b"a") is None
    for other in (b"\x7f\x61a\xff", b"\xd8\x23\x61a", b"\x41a", b"\x61\xff", b"\x7c", b"\x01"):
        assert text_in_cbor(other) is None


# --- what we use of Modal's client that is not public ---


def test_what_modals_client_keeps_to_itself_is_where_it_was(lab):
    """If this fails with a new client, ``_wire.py`` is the file to change."""
    record = modal.Dict.from_name("held", create_if_missing=True, client=lab.client)
    record.put("one", "1")
    record.put("two", ["not", "text"])
    assert _wire.get_entry(record, "one") == "1"
    assert _wire.get_entry(record, "two") == ""
    assert _wire.get_entry(record, "three") is None
    assert _wire.get_entries(record) == {"one": "1", "two": ""}
    _wire.remove_entry(record, "two")
    _wire.remove_entry(record, "two")
    assert dict(record.items()) == {"one": "1"}
    (handle,) = lab.launch(1)
    call = handle.metadata["function_call_id"]
    assert _wire.get_end(lab.client, call) is None
    assert _wire.get_status(lab.client, call) == "PENDING"
    lab.call(handle).stop()
    assert _wire.get_end(lab.client, call).status == "TERMINATED"
    assert _wire.get_status(lab.client, call) == "TERMINATED"
    assert _wire._word(99) == "STATUS_99"


def test_a_record_that_names_the_call_of_another_app(lab):
    """Writing into a Dict ends no call that its writer could not end, nor makes it ours."""
    lab.world.deploy("other", ["function"])
    theirs = modal.Function.from_name("other", "function", client=lab.client).spawn().object_id
    handles = lab.launch(2)
    lab.record().put("call-0", {"call": theirs})
    words = f"names the call {theirs}, which is none of the app 'diloco'"
    with pytest.raises(DamagedRecordError, match=words):
        lab.launch(2)
    forged, own = lab.executor().attach("run")
    assert own == handles[1]
    with pytest.raises(DamagedRecordError, match=words):
        lab.executor().cancel(forged)
    with pytest.raises(BackendError, match=words):
        lab.executor().cancel_run("run")
    assert [lab.world.call(theirs).status, lab.call(own).status] == ["pending", "terminated"]
    launch = lab.record().get("launch")
    lab.record().put("launch", {**launch, "grace": "long"})
    with pytest.raises(DamagedRecordError, match=f"but for these, which may cost money: {theirs}"):
        lab.executor().cancel_run("run")
    assert lab.world.call(theirs).status == "pending"


def test_an_app_that_was_stopped_and_deployed_anew(lab):
    ours, other = lab.executor(), lab.executor()
    lab.launch(1, other, run_id="before")
    ours.cancel_run("before")
    lab.world.stop_app("diloco")
    lab.world.deploy("diloco", ["replica"])
    (handle,) = lab.launch(1, other, run_id="after")
    ours.cancel(handle)
    assert lab.call(handle).status == "terminated"


def test_a_record_of_another_app_ends_none_of_its_calls(lab):
    """A Dict that anyone may have written names a call that is really of the app that it names."""
    lab.world.deploy("other", ["serve"])
    theirs = modal.Function.from_name("other", "serve", client=lab.client).spawn().object_id
    lab.launch(1)
    record = lab.record()
    record.put("launch", {**record.get("launch"), "app": "other", "function": "serve"})
    record.put("call-0", {"call": theirs})
    (forged,) = lab.executor().attach("run")
    for end in (lambda: lab.executor().cancel(forged), lambda: lab.executor().cancel_run("run")):
        with pytest.raises(BackendError, match="which is none of the app 'diloco'"):
            end()
    record.put("launch", {**record.get("launch"), "grace": "long"})
    with pytest.raises(DamagedRecordError, match=f"may cost money: {theirs}"):
        lab.executor().cancel_run("run")
    assert lab.world.call(theirs).status == "pending"


ODD = {
    "exit_code": [-1, 4242, 2**40, None, "0"],
    "attempt": [2**40, 0, -1],
    "started_at": [-1, 1e15, "now"],
    "finished_at": [-1, 1e15],
    "signal": [5, "SIGNOTHING"],
    "reason": ["preempted", "lost", "stopped_externally", "nothing"],
    "version": [1, 10**30],
}


def test_outcomes_that_cannot_be(lab):
    """Each is a failure of its own rank, which says what is wrong; the others are collected."""
    odd = [(name, value) for name, values in ODD.items() for value in values]
    handles = lab.launch(len(odd) + 1)
    for handle, (name, value) in zip(handles, odd, strict=False):
        lab.begin(handle)
        text = json.dumps({**json.loads(lab.outcome(7)), name: value})
        lab.call(handle).end(text)
    lab.begin(handles[-1])
    lab.finish(handles[-1], "whole")
    *damaged, whole = lab.executor().collect(handles, timeout=10)
    assert (whole["status"], whole["result"]) == ("succeeded", "whole")
    for result, (name, _) in zip(damaged, odd, strict=True):
        assert (result["status"], result["result"]) == ("failed", None)
        assert "no replica's outcome was read from what the call returned" in result["error"]
        assert name in result["error"]


def test_the_unpickler_of_modals_client_is_not_used(lab, monkeypatch):
    """By no verb, whatever a call returns and however a rank has ended."""
    used = []

    def refuse(*told):
        used.append(told)
        raise AssertionError("something is unpickled")

    monkeypatch.setattr(_serialization.Unpickler, "__init__", refuse)
    monkeypatch.setattr(_serialization.cbor2, "loads", refuse)
    handles = lab.launch(3)
    for handle in handles:
        lab.begin(handle)
        lab.call(handle).log("a line\n")
    lab.finish(handles[0], 7)
    lab.finish(handles[1], "a" * 3_000_000)
    lab.launch(3)
    lab.executor().cancel(handles[2])
    lab.executor().collect(handles, timeout=1)
    try_all(lab, handles[0])
    record = modal.Dict.from_name("another", create_if_missing=True, client=lab.client)
    record.put("a", 1)
    assert not used
    with pytest.raises(modal.exception.DeserializationError):
        record.get("a")
    assert used


def test_a_record_with_the_digest_of_a_launch_and_other_words(lab):
    """Whoever knows all arguments of a launch knows its digest, too."""
    (handle,) = lab.launch(1)
    launch = lab.record().get("launch")
    for more in ({"app": "other"}, {"world_size": 2}, {"environment": "dev"}, {"grace": 3000.0}):
        lab.record().put("launch", {**launch, **more})
        with pytest.raises(RunConflictError, match="is not the record of a run"):
            lab.launch(1)
    lab.record().put("launch", launch)
    assert lab.launch(1) == [handle]
