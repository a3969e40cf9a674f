"""Runs over the scripted stand-in: handles, states, attempts, results and purge."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from datetime import datetime

import modal
import pytest
from modal_truth import told

from diloco_localcloud._server._http import CutError
from diloco_modal._client._client import Client
from diloco_modal._client._errors import MissingError
from diloco_modal._state import _ends
from diloco_modal._wrapper import kept
from diloco_protocol import (
    BackendError,
    FolderJournal,
    InvalidRequestError,
    Outcome,
    Reason,
    ReplicaNotFoundError,
    RunConflictError,
    ThrottledError,
    UnavailableError,
)


def test_a_run_from_its_launch_to_its_results(lab):
    executor = lab.executor()
    handles = lab.launch(2, executor)
    assert [told(executor.describe(each)) for each in handles] == [
        ("pending", Reason.QUEUED, 1, False)
    ] * 2
    for handle in handles:
        lab.begin(handle)
    assert executor.poll(handles[0]) == "running"
    lab.finish(handles[0], {"loss": 0.5})
    lab.finish(handles[1], code=3, reason=Reason.ERROR, error="no data")
    first, second = lab.executor().collect(handles, timeout=5)
    assert (first["status"], first["exit_code"], first["result"]) == ("succeeded", 0, {"loss": 0.5})
    assert (second["status"], second["exit_code"], second["error"]) == ("failed", 3, "no data")
    assert executor.collect(handles, timeout=5) == [first, second]


@pytest.mark.parametrize(("most", "name"), [(2, "MAX_REPLICAS"), (3000, "_MOST_BYTES")])
def test_of_many_ends_the_latest_are_remembered(lab, monkeypatch, most, name):
    monkeypatch.setattr(_ends, name, most)
    executor = lab.executor()
    handles = lab.launch(4, executor)
    for handle in handles:
        lab.begin(handle)
        lab.finish(handle, "x" * 1000)
    results = executor.collect(handles, timeout=5)
    assert [each["result"] for each in results] == ["x" * 1000] * 4
    assert len(executor._observer._ends) == 2
    assert [executor.poll(handle) for handle in handles] == ["succeeded"] * 4
    executor.purge(handles[0])
    assert (len(executor._observer._ends), executor._observer._ends._bytes) == (0, 0)


def test_a_handle_says_where_and_when_its_replica_was_launched(lab):
    at = lab.world.now()
    (handle,) = lab.launch(1)
    lab.world.advance(100)
    (again,) = lab.launch(1)
    assert again == handle
    assert datetime.fromisoformat(handle.metadata["launched_at"]).timestamp() == pytest.approx(
        at, abs=0.01
    )
    assert (handle.metadata["app"], handle.metadata["function"]) == ("diloco", "replica")


def test_a_result_that_was_lost_with_its_container_is_no_result(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    text = kept(Outcome(0, result="x" * 5000).to_json())
    lab.call(handle).end(text)
    for executor in (lab.executor(), lab.executor()):
        (result,) = executor.collect([handle])
        assert (result["status"], result["result"], result["exit_code"]) == ("succeeded", None, 0)
        assert "a result of 5" in result["error"]


def test_a_clock_that_was_set_back_does_not_keep_what_was_read(lab):
    """A Dict may have other entries than a minute before, and as many."""
    now = [lab.world.now()]
    executor = lab.executor(clock=lambda: now[0])
    (handle,) = lab.launch(1, executor)
    assert executor.poll(handle) == "pending"
    lab.record().put("life-0-1", {"attempt": 1, "at": now[0]})
    lab.record().pop("launch")
    now[0] -= 3600
    with pytest.raises(ReplicaNotFoundError, match="is empty"):
        executor.poll(handle)


def test_what_has_ended_and_is_about_to_return_is_not_waiting_for_another_attempt(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    end = {"started": 1, "failed": 0, "at": lab.world.now(), "again": False}
    lab.record().put("end-0-1", end)
    assert told(executor.describe(handle)) == ("running", None, 1, False)


def test_what_has_ended_stays_as_it_is(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, 7)
    executor.cancel(handle)
    assert executor.poll(handle) == "succeeded"
    assert lab.record().get("cancel-0") is None


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("oom", Reason.OOM),
        ("crash", Reason.PLATFORM),
        ("break_down", Reason.PLATFORM),
        ("timeout", Reason.TIMEOUT),
        ("exit", Reason.START_FAILED),
        ("fail", Reason.START_FAILED),
        ("barrier", Reason.START_FAILED),
        ("other", Reason.ERROR),
    ],
)
def test_other_ends(lab, end, reason):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    call = lab.call(handle)
    if end == "timeout":
        lab.world.advance(800)
    elif end == "exit":
        call.exit(3)
    elif end == "fail":
        call.fail(ValueError("not ours"))
    elif end == "barrier":
        call.fail(TimeoutError("not Modal's"))
    elif end == "other":
        call.end({"not": "an outcome"})
    else:
        getattr(call, end)()
    assert told(executor.describe(handle))[:2] == ("failed", reason)


def test_a_large_result_that_could_not_be_fetched_is_no_failure(lab):
    """It is in a bucket, from which it is fetched by HTTP."""

    class Away(dict):
        left = 2

        def get(self, blob_id):
            self.left -= 1
            if self.left >= 0:
                raise CutError
            return super().get(blob_id)

    executor = lab.executor(retry_timeout=0)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, "a" * 3_000_000)
    lab.stand_in._workspace.blobs = Away(lab.stand_in._workspace.blobs)
    lab.stand_in.faults.add("throttle", verb="BlobGet")
    with pytest.raises(ThrottledError):
        executor.describe(handle)
    with pytest.raises(UnavailableError, match="its result could not be fetched: "):
        executor.describe(handle)
    (result,) = executor.collect([handle])
    assert (result["status"], len(result["result"])) == ("succeeded", 3_000_000)
    assert lab.stand_in._workspace.blobs.left < 0


def test_what_is_not_text_is_not_what_a_replica_returns(lab):
    (handle,) = lab.launch(1)
    lab.call(handle).start()
    lab.call(handle).end({"not": "text"})
    status = lab.executor().describe(handle)
    assert told(status)[:2] == ("failed", Reason.START_FAILED)
    assert "is not text, and is not unpickled; deploy the app" in status.message


def test_a_new_life_is_the_next_attempt(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.record().put("end-0-1", {"started": 1, "failed": 0, "at": lab.world.now()})
    assert told(executor.describe(handle)) == ("pending", Reason.PREEMPTED, 2, False)
    lab.record().put("life-0-2", {"attempt": 2, "at": lab.world.now()})
    assert told(executor.describe(handle)) == ("running", None, 2, False)


def test_times_of_starts_and_ends_are_kept(lab):
    executor = lab.executor()
    handles = lab.launch(2, executor)
    launched = lab.world.now()
    lab.world.advance(100)
    lab.begin(handles[0])
    lab.record().put("end-0-1", {"started": 1, "failed": 0, "at": launched + 150})
    lab.world.advance(100)
    lab.finish(handles[0])
    executor.cancel(handles[1])
    lab.world.advance(100)
    first, second = (lab.executor().describe(handle) for handle in handles)
    assert (first.started_at, first.finished_at) == (launched + 100, launched + 150)
    assert (second.started_at, second.finished_at) == (None, launched + 200)


def test_what_was_killed_is_dated_by_who_sees_it_first(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).oom()
    first = executor.describe(handle)
    assert (first.exit_code, first.signal, first.finished_at) == (137, "SIGKILL", lab.world.now())
    lab.world.advance(100)
    assert lab.executor().describe(handle) == first


def test_a_dict_of_somebody_else_is_no_run(lab):
    theirs = modal.Dict.from_name("diloco-run", create_if_missing=True, client=lab.client)
    theirs.put("weights", 1)
    assert lab.executor().list_runs() == []
    with pytest.raises(RunConflictError, match="is not the record of a run"):
        lab.launch()
    assert dict(theirs.items()) == {"weights": 1}


def test_a_connection_that_is_cut_is_worth_another_try(lab):
    (handle,) = lab.launch(1)
    lab.stand_in.faults.add("cut", verb="DictLen", times=None)
    with pytest.raises(UnavailableError, match="StreamTerminatedError"):
        lab.executor().describe(handle)


def test_purge(lab):
    executor = lab.executor()
    handles = lab.launch(2, executor)
    with pytest.raises(InvalidRequestError, match="have not ended"):
        executor.purge(handles[0])
    for handle in handles:
        lab.begin(handle)
        lab.finish(handle)
    executor.purge(handles[0])
    executor.purge(handles[0])
    with pytest.raises(ReplicaNotFoundError):
        executor.describe(handles[0])
    assert executor.list_runs() == []


@pytest.mark.sampled
@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_record_that_has_taken_the_name_of_a_purged_one_stays(lab, monkeypatch, moment):
    """It is made just before Modal answers where the name leads, for the so-manieth time."""
    handles = lab.launch(2)
    for handle in handles:
        lab.begin(handle)
        lab.finish(handle)
    dicts, take = lab.stand_in._workspace.dicts, lab.stand_in.faults.take
    asked, made = [], [None]

    def take_later(verb, resource):
        if verb == "DictGetOrCreate":
            asked.append(verb)
            if len(asked) == moment:
                dicts.delete(dicts.named("main", "diloco-run").dict_id)
                made[0] = dicts.create("main", "diloco-run")
        return take(verb, resource)

    monkeypatch.setattr(lab.stand_in.faults, "take", take_later)
    with contextlib.suppress(BackendError):
        lab.executor().purge(handles[0])
    assert dicts.named("main", "diloco-run") is made[0]


@pytest.mark.parametrize("gone", ["record", "call"])
def test_what_is_removed_while_somebody_looks_is_not_found(lab, monkeypatch, gone):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).stop()
    plain = Client.put_once

    async def end(*_, **__):
        raise MissingError("no such call")

    def put_once(*told):
        modal.Dict.objects.delete("diloco-run", client=lab.client)
        return plain(*told)

    if gone == "call":
        for _ in range(2):  # Modal may have forgotten it
            lab.world.advance(4 * 86_400)
            assert lab.executor().exists("run")
        monkeypatch.setattr(Client, "end", end)
    else:
        monkeypatch.setattr(Client, "put_once", put_once)
    with pytest.raises(ReplicaNotFoundError):
        lab.executor().describe(handle)


def unknown_to_modal(monkeypatch, handle, *verbs):
    """Modal says that there is no such call, where it is asked about it by one of these."""
    unknown = handle.metadata["function_call_id"]

    def refusing(plain):
        def ask(self, call, **options):
            if call == unknown:
                raise MissingError("no such call")
            return plain(self, call, **options)

        return ask

    for verb in verbs:
        monkeypatch.setattr(Client, verb, refusing(getattr(Client, verb)))


@pytest.mark.sampled
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_call_that_modal_would_have_to_know_is_not_gone(lab, monkeypatch, begun, knows):
    """The others are seen, what may run is not passed over, and the record stays."""
    executor = lab.executor()
    handles = lab.launch(3, executor)
    first, second, _ = handles
    for handle in handles[1 - begun :]:
        lab.begin(handle)
    lab.finish(second, 7)
    unknown_to_modal(monkeypatch, first, "end", *([] if knows else ["cancel"]))
    words = "does not know the call .* of rank 0, .* it may be running"
    for verb in (executor.describe, lambda handle: executor.collect([handle])):
        with pytest.raises(BackendError, match=words):
            verb(first)
    results = executor.collect(handles, timeout=0)
    state = "running" if begun else "pending"
    assert [each["status"] for each in results] == [state, "succeeded", "running"]
    lab.finish(handles[2], 8)
    with pytest.raises(BackendError, match=words):
        executor.collect(handles)
    with pytest.raises(InvalidRequestError, match="have not ended, such as rank 0"):
        executor.purge(second)
    assert (lab.executor().exists("run"), executor.attach("run")) == (True, handles)
    for cancel in (lambda: executor.cancel(first), lambda: executor.cancel_run("run")):
        if knows:
            cancel()
        else:
            with pytest.raises(BackendError, match=words):
                cancel()
    ended = "terminated" if knows else state
    assert lab.call(first).status == ended
    assert (lab.record().get("cancel-0") is not None) == knows


def end_of(lab, handle, outcome="", again=False):
    end = {"started": 1, "failed": 0, "at": lab.world.now(), "again": again, "outcome": outcome}
    lab.record().put(f"end-{handle.rank}-1", end)


@pytest.mark.parametrize("age", [60, 8 * 86_400])
def test_an_end_that_the_record_has_is_told_though_modal_knows_the_call_no_more(
    lab, monkeypatch, tmp_path, age
):
    handles = lab.launch(5)
    for handle in handles[:4]:
        lab.begin(handle)
    end_of(lab, handles[0], lab.outcome({"loss": 1}))
    end_of(lab, handles[1], lab.outcome(code=3, error="no data"))
    lab.executor().cancel(handles[2])
    end_of(lab, handles[2])
    end_of(lab, handles[3])  # it does not say how
    lab.executor().cancel(handles[4])
    assert (
        lab.executor().poll(handles[4]) == "cancelled"
    )  # before it had begun: whoever sees it writes that down
    for _ in range(2):
        lab.world.advance(age / 2)
        lab.executor().exists("run")
    for handle in handles:
        unknown_to_modal(monkeypatch, handle, "end", "cancel")
    executor = lab.executor(journal=FolderJournal(tmp_path))
    results = executor.collect(handles, timeout=5)
    states = ["succeeded", "failed", "cancelled", "failed", "cancelled"]
    assert [each["status"] for each in results] == states
    assert (results[0]["result"], results[1]["error"]) == ({"loss": 1}, "no data")
    assert results[3]["reason"] == "lost"
    executor.cancel(handles[0])
    executor.cancel_run("run")
    executor.purge(handles[0])
    assert FolderJournal(tmp_path).end(handles[0])[1] == {"loss": 1}
    assert not executor.exists("run")


def test_the_next_attempt_of_a_call_that_modal_does_not_know_may_be_running(lab, monkeypatch):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    end_of(lab, handle, again=True)
    unknown_to_modal(monkeypatch, handle, "end", "cancel")
    for verb in (lab.executor().describe, lab.executor().cancel, lab.executor().purge):
        with pytest.raises(BackendError, match="it may be running"):
            verb(handle)


def test_a_restart_in_a_container_is_the_next_attempt(lab):
    (handle,) = lab.launch(1, max_restarts=2)
    lab.begin(handle)
    lab.world.advance(5)
    began = lab.world.now()
    lab.record().put("attempt-0-2", {"at": began})
    status = lab.executor().describe(handle)
    assert (status.state, status.attempt, status.started_at) == ("running", 2, began)


def test_a_result_is_the_callers_own(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, {"losses": [0.5]})
    executor.collect([handle])[0]["result"]["losses"].append("of the caller")
    assert executor.collect([handle])[0]["result"] == {"losses": [0.5]}


def test_a_handle_that_was_changed_finds_nothing(lab):
    """And is not told that its replica was cancelled, while it goes on."""
    (handle,) = lab.launch(1)
    executor = lab.executor()
    for other in (
        replace(handle, metadata={**handle.metadata, "function": "another"}),
        replace(handle, world_size=2),
    ):
        with pytest.raises(ReplicaNotFoundError):
            executor.describe(other)
        with pytest.raises(BackendError, match=r"of its launch; .*has not ended"):
            executor.cancel(other)
        with pytest.raises(InvalidRequestError, match=r"of its launch; .*nothing is removed"):
            executor.purge(other)
        assert executor.poll(handle) == "pending"
    executor.cancel(handle)
    lab.executor().cancel(other)  # nothing is left that could cost money


def test_a_server_that_is_silent_leaves_no_threads(lab):
    """What is not answered in time is cancelled, also where an event loop runs."""
    executor = lab.executor(request_timeout=0.2, retry_timeout=1.0)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.executor().poll(handle)
    lab.stand_in.faults.add("delay", verb="DictLen", resource="modal", seconds=30, times=None)
    before = threading.active_count()

    async def poll():
        return executor.poll(handle)

    for look in (lambda: executor.poll(handle), lambda: asyncio.run(poll())):
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.2 s"):
            look()
    assert threading.active_count() <= before


def test_a_purge_with_a_journal_waits_out_what_passes(lab, tmp_path):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.finish(handle, 7)
    journal = FolderJournal(tmp_path)
    lab.stand_in.faults.add("throttle", verb="FunctionGetOutputs")
    lab.executor(journal=journal).purge(handle)
    assert journal.end(handle)[1] == 7
    assert lab.executor().list_runs() == []
