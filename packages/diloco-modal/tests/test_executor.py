"""The verbs, over the scripted stand-in."""

import os
import signal
import sys
import time
from dataclasses import replace
from datetime import datetime
from types import ModuleType

import modal
import pytest
from modal._utils import blob_utils
from modal.exception import ExecutionError

from diloco_localcloud import ModalStandIn
from diloco_modal import ModalSpawnExecutor, _logs, build_app
from diloco_modal._client import Client
from diloco_modal._wrapper import kept
from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    FolderJournal,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    Outcome,
    Reason,
    ReplicaNotFoundError,
    RunConflictError,
    UnavailableError,
)


def told(status):
    return status.state.value, status.reason, status.attempt, status.stopping


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


def test_every_call_is_told_its_rank_and_all_have_the_same_options(lab):
    handles = lab.launch(3, gpu="H100:2", cpu=4, memory="16Gi", env={"A": "1"})
    calls = [lab.call(each) for each in handles]
    payloads = [call.arguments[0][0] for call in calls]
    assert [payload["rank"] for payload in payloads] == [0, 1, 2]
    assert payloads[0]["env"] == {"A": "1"}
    assert calls[0].options == calls[2].options
    assert calls[0].options["timeout"] == 600 + 10 + 120


def test_the_same_launch_gives_the_same_handles_and_another_one_is_refused(lab):
    handles = lab.launch()
    assert lab.launch() == handles
    assert len(lab.world.calls()) == 2
    with pytest.raises(RunConflictError, match="another launch of the name 'run'"):
        lab.launch(3)
    assert lab.executor().attach("run") == handles
    assert lab.executor().list_runs() == ["run"]


def test_a_lost_answer_to_a_spawn_leaves_one_holder_of_each_rank(lab):
    lab.stand_in.faults.add("ambiguous", verb="FunctionMap", resource="modal", times=1)
    handles = lab.launch()
    held = {lab.record().get(f"call-{rank}")["call"] for rank in range(2)}
    assert held == {each.metadata["function_call_id"] for each in handles}


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
        assert "before a result of 5" in result["error"]


def test_the_grace_of_the_launch_counts_whoever_looks(lab):
    (handle,) = lab.launch(1, lab.executor(grace=25.0))
    lab.begin(handle)
    executor = lab.executor(grace=0.0)
    executor.cancel(handle)
    lab.world.advance(54)
    assert executor.poll(handle) == "running"
    lab.world.advance(2)
    assert executor.poll(handle) == "cancelled"


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


def test_who_came_first_holds_the_rank(lab):
    handles = lab.launch(1)
    executor = lab.executor()
    lab.record().pop("call-0")
    lab.record().put("call-0", {"call": "fc-other"})
    with pytest.raises(ReplicaNotFoundError):
        executor.describe(handles[0])
    assert executor.attach("run")[0].metadata["function_call_id"] == "fc-other"


def test_cancelled_only_when_the_container_is_gone(lab):
    executor = lab.executor()
    handles = lab.launch(2, executor)
    lab.begin(handles[0])
    executor.cancel(handles[0])
    assert told(executor.describe(handles[0])) == ("running", Reason.CANCEL_REQUESTED, 1, True)
    assert executor.describe(handles[0]).finished_at is None
    assert lab.record().get("over-0") is None
    lab.world.advance(60)
    assert told(executor.describe(handles[0]))[:2] == ("cancelled", Reason.CANCEL_REQUESTED)
    executor.cancel_run("run")
    assert told(executor.describe(handles[1]))[:2] == ("cancelled", Reason.CANCEL_REQUESTED)
    assert executor.collect(handles, timeout=1)[0]["exit_code"] is None


def test_a_call_that_modal_does_not_know_any_more_is_no_obstacle_to_a_cancel(lab):
    lab.launch(2)
    lab.stand_in._workspace.calls._calls.clear()
    lab.executor().cancel_run("run")


@pytest.mark.parametrize("code", [0, 3])
def test_what_had_ended_and_was_cancelled_before_it_had_returned_has_ended(lab, code):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    outcome = lab.outcome(
        None if code else 7, code=code, reason=Reason.ERROR if code else Reason.COMPLETED
    )
    end = {"started": 1, "failed": 0, "at": lab.world.now(), "again": False, "outcome": outcome}
    lab.record().put("end-0-1", end)
    executor.cancel(handle)
    assert lab.call(handle).status == "terminated"
    for each in (executor, lab.executor()):
        (result,) = each.collect([handle])
        assert (result["status"], result["result"]) == (
            ("failed", None) if code else ("succeeded", 7)
        )


def test_a_cancel_kills_what_does_not_react(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).ignore_interrupt()
    executor.cancel(handle)
    lab.world.advance(60)
    assert not lab.call(handle).has_container
    status = executor.describe(handle)
    # Nobody saw when its container was gone, but for the one who looks now.
    assert (status.state, status.finished_at) == ("cancelled", lab.world.now())


def test_cancelled_between_two_lives_it_is_the_next_attempt(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).preempt()
    lab.record().put("end-0-1", {"started": 1, "failed": 0, "at": lab.world.now()})
    lab.world.advance(2)
    assert told(executor.describe(handle))[::2] == ("pending", 2)
    executor.cancel(handle)
    assert told(executor.describe(handle))[::2] == ("cancelled", 2)
    assert lab.executor().describe(handle).finished_at == lab.world.now()


@pytest.mark.parametrize(
    ("again", "attempt"), [(True, 2), (False, 1), (None, 1)], ids=["between", "within", "unknown"]
)
def test_stopped_from_outside_the_attempt_is_that_which_the_container_has_told(lab, again, attempt):
    """The container sees whether Modal will run its call again; who looks later cannot tell when the call was stopped."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    end = {"started": 1, "failed": 0, "at": lab.world.now()}
    lab.record().put("end-0-1", end if again is None else {**end, "again": again})
    lab.call(handle).stop()
    lab.world.advance(100)
    for each in (executor, lab.executor()):
        status = each.describe(handle)
        assert told(status) == ("cancelled", Reason.STOPPED_EXTERNALLY, attempt, False)
    stopped_at = end["at"] + (
        100 if again else 0
    )  # of the former nobody knows but who sees it first
    assert (status.started_at is None, status.finished_at) == (again is True, stopped_at)


def test_a_clock_that_is_ahead_does_not_make_a_cancel_come_after_the_end_that_it_caused(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    executor.cancel(handle)
    at = lab.world.now() - 5  # by the container's clock
    lab.record().put("end-0-1", {"started": 1, "failed": 0, "at": at, "again": False})
    lab.world.advance(60)
    assert told(executor.describe(handle))[::2] == ("cancelled", 1)


def test_what_has_ended_and_is_about_to_return_is_not_waiting_for_another_attempt(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    end = {"started": 1, "failed": 0, "at": lab.world.now(), "again": False}
    lab.record().put("end-0-1", end)
    assert told(executor.describe(handle)) == ("running", None, 1, False)


def test_a_stop_from_outside(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).stop()
    assert told(executor.describe(handle)) == ("running", Reason.STOPPED_EXTERNALLY, 1, True)
    lab.world.advance(60)
    # Another executor knows since when it was stopped: the first one has written it down.
    assert told(lab.executor().describe(handle))[:2] == ("cancelled", Reason.STOPPED_EXTERNALLY)


def test_what_has_ended_stays_as_it_is(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, 7)
    executor.cancel(handle)
    assert executor.poll(handle) == "succeeded"
    assert lab.record().get("cancel-0") is None


def test_a_refused_cancel_changes_nothing(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.stand_in.faults.add("forbidden", verb="FunctionCallCancel", resource="modal", times=1)
    with pytest.raises(BackendError):
        executor.cancel(handle)
    assert told(executor.describe(handle)) == ("running", None, 1, False)
    executor.cancel(handle)
    assert executor.describe(handle).stopping


@pytest.mark.parametrize("verb", ["DictPop", "DictUpdate"])
def test_a_refused_cancel_leaves_no_mark_if_its_removal_or_its_answer_is_lost(lab, verb):
    """Each call of the client is tried four times; a mark that was left would show the replica as stopping for ever."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.stand_in.faults.add("server_error", verb="FunctionCallCancel", times=None)
    kind = "server_error" if verb == "DictPop" else "ambiguous"
    lab.stand_in.faults.add(kind, verb=verb, times=4)
    with pytest.raises(UnavailableError):
        executor.cancel(handle)
    assert told(executor.describe(handle)) == ("running", None, 1, False)


def test_a_refused_cancel_leaves_the_mark_of_another(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    theirs = {"by": "executor", "at": lab.world.now(), "id": "theirs"}
    lab.record().put("cancel-0", theirs)
    lab.stand_in.faults.add("forbidden", verb="FunctionCallCancel")
    with pytest.raises(BackendError):
        executor.cancel(handle)
    assert lab.record().get("cancel-0") == theirs


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
        ("other", Reason.START_FAILED),
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


@pytest.mark.parametrize(
    "error",
    [ExecutionError("Get from url failed with status 503"), ConnectionResetError(104, "reset")],
)
def test_a_large_result_that_could_not_be_fetched_is_no_failure(lab, monkeypatch, error):
    """Modal's client fetches it from a bucket, and tries that once."""
    fetch, errors = blob_utils._download_from_url, [error] * 3

    async def fetched(url):
        if errors:
            raise errors.pop()
        return await fetch(url)

    monkeypatch.setattr(blob_utils, "_download_from_url", fetched)
    executor = lab.executor(retry_timeout=0)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, "a" * 3_000_000)
    with pytest.raises(UnavailableError, match=r"could not be fetched, .* SUCCESS: "):
        executor.describe(handle)
    (result,) = executor.collect([handle])
    assert (result["status"], len(result["result"])) == ("succeeded", 3_000_000)
    assert not errors


def test_an_error_of_the_client_about_what_has_not_ended_is_no_failure(lab, monkeypatch):
    executor = lab.executor(retry_timeout=0)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)

    async def answer(*_):
        raise ConnectionResetError(104, "reset")

    with monkeypatch.context() as patch:
        patch.setattr(Client, "answer", answer)
        with pytest.raises(UnavailableError, match="PENDING: ConnectionResetError"):
            executor.describe(handle)
    assert executor.poll(handle) == "running"


def test_what_cannot_be_unpickled_here_is_not_what_a_replica_returns(lab, monkeypatch):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    module = ModuleType("not_here")
    module.Strange = type("Strange", (), {"__module__": "not_here"})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "not_here", module)
        lab.call(handle).end(module.Strange())
    status = lab.executor().describe(handle)
    assert told(status)[:2] == ("failed", Reason.START_FAILED)
    assert "not_here" in status.message


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
    with pytest.raises(InvalidRequestError, match="has not ended"):
        executor.purge(handles[0])
    for handle in handles:
        lab.begin(handle)
        lab.finish(handle)
    executor.purge(handles[0])
    executor.purge(handles[0])
    with pytest.raises(ReplicaNotFoundError):
        executor.describe(handles[0])
    assert executor.list_runs() == []


def test_a_launch_that_fails_leaves_nothing(lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", resource="modal", after=2, times=None)
    with pytest.raises(BackendError):
        lab.launch(4)
    assert {call.status for call in lab.world.calls()} <= {"terminated"}
    assert lab.executor().list_runs() == []
    lab.stand_in.faults.clear()
    assert len(lab.launch(4)) == 4


def test_a_launch_that_fails_leaves_alone_what_another_process_has_started(lab, monkeypatch):
    """Both launch the same run at the same time; the other one's call holds a rank, and has to be found."""
    plain = Client.hold

    async def hold(self, record, key, value):
        if key == "call-1":
            lab.record().put(key, {"call": "fc-other"})
        return await plain(self, record, key, value)

    monkeypatch.setattr(Client, "hold", hold)
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", after=3, times=None)
    with pytest.raises(LaunchError, match="fc-other"):
        lab.launch(4)
    assert {call.status for call in lab.world.calls()} == {"terminated"}
    entries = lab.record().items()
    assert entries["call-1"] == {"call": "fc-other"}
    assert "cancel-1" not in entries


def test_a_launch_that_fails_does_not_remove_the_record_that_another_process_has_made(lab):
    """It has started nothing yet, and may be about to."""
    lab.launch(1)
    lab.record().pop("call-0")
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", times=None)
    with pytest.raises(ForbiddenError):
        lab.launch(1)
    assert set(lab.record().items()) == {"launch"}


def test_a_launch_that_another_process_has_begun_and_that_fails_can_be_repeated(lab):
    handles = lab.launch(2)
    lab.record().pop("call-1")
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", times=None)
    with pytest.raises(ForbiddenError):
        lab.launch(2)
    lab.stand_in.faults.clear()
    again = lab.launch(2)
    assert again[0] == handles[0]
    assert again[1] != handles[1]
    assert [lab.executor().poll(handle) for handle in again] == ["pending", "pending"]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("stuck", [False, True])
def test_ctrl_c_ends_what_was_started(lab, monkeypatch, stuck):
    """And what cannot be ended is named in a note; nobody claims the ranks that were not started."""
    if stuck:
        lab.stand_in.faults.add("forbidden", verb="FunctionCallCancel", times=None)
    plain = Client.spawn

    async def spawn(self, function, payload):
        call = await plain(self, function, payload)
        if payload["rank"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return call

    monkeypatch.setattr(Client, "spawn", spawn)
    with pytest.raises(KeyboardInterrupt) as caught:
        lab.launch(100)
    calls = lab.world.calls()
    assert 3 <= len(calls) < 100
    if stuck:
        (note,) = caught.value.__notes__
        assert "may be running, and cost money" in note
        assert all(call.call_id in note for call in calls)
        held = {lab.record().get(f"call-{rank}")["call"] for rank in range(100)}
        assert held == {"", *(call.call_id for call in calls)}
    else:
        assert {call.status for call in calls} == {"terminated"}
        assert lab.executor().list_runs() == []


def test_what_could_not_be_ended_is_listed_and_the_rest_cannot_start(lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", resource="modal", after=2, times=None)
    lab.stand_in.faults.add("forbidden", verb="FunctionCallCancel", resource="modal", times=None)
    with pytest.raises(LaunchError, match="2 calls of this launch could not be ended") as caught:
        lab.launch(4)
    ranks = {each.rank for each in caught.value.survivors}
    assert len(ranks) == 2
    void = {rank for rank in range(4) if lab.record().get(f"call-{rank}") == {"call": ""}}
    assert void == set(range(4)) - ranks
    lab.stand_in.faults.clear()
    for handle in caught.value.survivors:
        assert told(lab.executor().describe(handle)) == ("pending", Reason.QUEUED, 1, False)
    for handle in caught.value.survivors:
        lab.executor().cancel(handle)
    with pytest.raises(RunConflictError, match="was cancelled before rank"):
        lab.launch(4)


def test_a_cancel_does_not_pass_over_what_lives_on_without_its_record(lab):
    """Somebody has removed the Dict: nobody would know of a container that goes on."""
    handles = lab.launch(2)
    lab.begin(handles[0])
    lab.finish(handles[0])
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    lab.executor().cancel(handles[0])
    call = lab.call(handles[1]).call_id
    with pytest.raises(BackendError, match=f"has not ended, and may cost money: .*{call}"):
        lab.executor().cancel(handles[1])
    lab.call(handles[1]).stop()
    lab.executor().cancel(handles[1])


def test_a_cancel_without_a_record_does_not_take_an_error_of_the_client_for_an_end(
    lab, monkeypatch
):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.world.call(handle.metadata["function_call_id"]).start()
    executor._client.delete_record("run", executor._client.record("run"))

    async def answer(*_):
        raise ConnectionResetError(104, "reset")

    monkeypatch.setattr(Client, "answer", answer)
    with pytest.raises(BackendError, match="the call of this handle has not ended"):
        executor.cancel(handle)


def test_a_run_that_only_a_journal_knows_is_not_said_to_be_cancelled_while_it_lives(lab, tmp_path):
    executor = lab.executor(journal=FolderJournal(tmp_path))
    (handle,) = lab.launch(1, executor)
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    with pytest.raises(BackendError, match="has not ended, and may cost money"):
        executor.cancel_run("run")
    lab.call(handle).stop()
    executor.cancel_run("run")


def test_cancelled_before_every_rank_was_started(lab):
    lab.launch(2)
    lab.record().pop("call-1")
    lab.executor().cancel_run("run")
    assert lab.record().get("call-1") == {"call": ""}


def test_a_run_is_cancelled_with_two_calls_for_each_replica_that_lives(lab):
    executor = lab.executor()
    handles = lab.launch(3, executor)
    for handle in handles[:2]:
        lab.begin(handle)
    lab.finish(handles[0], 7)
    before = len(lab.stand_in.calls)
    lab.executor().cancel_run("run")
    called = [call.verb for call in list(lab.stand_in.calls)[before:]]
    assert (called.count("DictUpdate"), called.count("FunctionCallCancel")) == (2, 2)
    assert lab.record().get("cancel-0") is None
    assert executor.poll(handles[0]) == "succeeded"


def test_a_run_is_cancelled_and_what_was_seen_to_end_is_left_alone(lab):
    """Also if its container could not write down its end."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    at = lab.world.now()
    lab.call(handle).end(Outcome(0, started_at=at, finished_at=at).to_json())
    assert executor.poll(handle) == "succeeded"
    executor.cancel_run("run")
    assert lab.record().get("cancel-0") is None


def test_logs(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    assert executor.stream_logs(handle) == ""
    lab.begin(handle)
    call = lab.call(handle)
    call.log("one\n")
    lab.world.advance(1)
    call.log("tw")
    lab.world.advance(1)
    call.log("o\n")
    call.log("wrong\n", "stderr")
    assert executor.stream_logs(handle, n_lines=2) == "two\nwrong"
    assert list(executor.log_iter(handle, streams="stdout")) == ["one", "two"]
    assert list(executor.log_iter(handle, regex="w")) == ["two", "wrong"]
    lab.finish(handle)
    assert list(executor.log_iter(handle, follow=True)) == ["one", "two", "wrong"]


def test_a_line_is_not_gone_on_with_by_another_stream_or_container(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    call = lab.call(handle)
    for piece, source in (("out", "stdout"), ("err\n", "stderr"), ("put\nunfini", "stdout")):
        call.log(piece, source)
        lab.world.advance(1)
    call.preempt()
    lab.world.advance(2)
    call.start()
    call.log("shed\n")
    assert executor.stream_logs(handle).split("\n") == ["err", "output", "unfini", "shed"]


def test_a_launcher_whose_clock_is_half_a_minute_ahead_sees_the_first_lines(lab):
    executor = lab.executor(clock=lambda: lab.world.now() + 30)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).log("first\n")
    assert list(executor.log_iter(handle)) == ["first"]


def test_a_log_that_cannot_be_read_is_shown_where_modal_has_it(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.stand_in.faults.add("forbidden", verb="AppFetchLogs", times=None)
    page = f"https://modal.com/id/{lab.call(handle).call_id}"
    with pytest.raises(ForbiddenError, match=f"which Modal shows at {page}:"):
        lab.executor().stream_logs(handle)
    assert lab.executor().describe(handle).url == page


def test_following_ends_at_its_time_and_bears_throttling(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).log("one\n")
    lab.stand_in.faults.add("throttle", verb="AppFetchLogs", times=3)
    until = lab.world.now() + 30
    assert list(executor.log_iter(handle, follow=True, until=until)) == ["one"]
    assert lab.world.now() >= until


def test_the_last_line_of_many_pieces(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    for piece in ("first\n", "a", "b", "c", "d", "e\n"):
        lab.call(handle).log(piece)
        lab.world.advance(1)
    assert executor.stream_logs(handle, n_lines=1) == "abcde"


def test_the_last_line_of_more_pieces_than_the_client_gives(lab, monkeypatch):
    """As of a progress bar, which writes many steps into one line."""
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("first\n")
    for step in range(40):
        lab.call(handle).log(f"\r{step}", "stderr")
        lab.world.advance(1)
    monkeypatch.setattr(_logs, "_MOST_ENTRIES", 20)
    steps = "".join(f"\r{step}" for step in range(40))
    assert lab.executor().stream_logs(handle, n_lines=1) == steps
    assert lab.executor().stream_logs(handle, n_lines=100) == f"first\n{steps}"


@pytest.mark.parametrize("behind", [600, -600], ids=["behind", "ahead"])
def test_logs_where_clocks_differ(lab, behind):
    with ModalStandIn(start=time.time() + behind) as stand_in:
        lab = type(lab)(stand_in)
        executor = lab.executor(clock=time.time)
        (handle,) = lab.launch(1, executor)
        lab.begin(handle)
        lab.call(handle).log("a line\n")
        assert list(executor.log_iter(handle)) == ["a line"]
        lab.client.__exit__(None, None, None)


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"app": "other"}, r"modal deploy my_app\.py.*build_app\('other', function='replica'"),
        ({"function": "other"}, r"modal deploy my_app\.py.*build_app\('diloco', function='other'"),
    ],
)
def test_what_is_not_deployed_is_named_with_the_command(lab, options, command):
    with pytest.raises(InvalidRequestError, match=command):
        lab.launch(1, lab.executor(**options))
    assert lab.executor().list_runs() == []


def test_a_secret_without_the_key_is_named(lab):
    lab.world.add_secret("tokens", {"OTHER": "1"})
    again = r"HF_TOKEN\. Make it again with all its keys: modal secret create --force tokens HF_TOKEN=\.\.\."
    with pytest.raises(InvalidRequestError, match=again):
        lab.launch(1, secrets={"HF_TOKEN": "tokens"})
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    assert lab.launch(1, secrets={"HF_TOKEN": "huggingface"})


def test_a_secret_that_could_not_be_looked_for_may_be_there(lab):
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    lab.stand_in.faults.add("server_error", verb="SecretGetOrCreate", times=None)
    with pytest.raises(UnavailableError):
        lab.launch(1, secrets={"HF_TOKEN": "huggingface"})
    assert not lab.world.calls()


def test_secrets_of_the_app_are_kept_if_they_are_named(lab):
    """What a launch names replaces those of the app."""
    lab.world.add_secret("bucket", {"AWS_ACCESS_KEY_ID": "1"})
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    secrets = {"HF_TOKEN": "huggingface"}
    (handle,) = lab.launch(1, lab.executor(app_secrets=["bucket"]), secrets=secrets)
    assert lab.call(handle).options["secrets"] == ["bucket", "huggingface"]
    with pytest.raises(InvalidRequestError, match=r"modal secret create other"):
        lab.launch(1, lab.executor(app_secrets=["other"]), secrets=secrets, run_id="two")


@pytest.fixture
def declared(lab):
    """Deploys an app whose function has these Secrets."""

    def deploy(*secrets):
        build_app("own", secrets=secrets).deploy(client=lab.client)
        return lab.executor(app="own")

    lab.world.add_secret("bucket", {"AWS_ACCESS_KEY_ID": "1"})
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    return deploy


tells_secrets = pytest.mark.skipif(
    isinstance(modal.Function.info, property),
    reason="clients of Modal before 1.6 do not tell the Secrets of a function",
)


@tells_secrets
def test_secrets_of_a_launch_join_those_of_the_app(lab, declared):
    executor = declared(modal.Secret.from_name("bucket"), modal.Secret.from_name("huggingface"))
    (handle,) = lab.launch(1, executor, secrets={"HF_TOKEN": "huggingface"})
    assert lab.call(handle).options["secrets"] == ["bucket", "huggingface"]
    (handle,) = lab.launch(1, executor, run_id="two")
    assert lab.call(handle).options["secrets"] == ["bucket", "huggingface"]
    assert lab.stand_in.calls.count("SecretList") == 1


@tells_secrets
def test_a_secret_of_the_app_that_nobody_can_name_is_not_taken_away(lab, declared):
    executor = declared(modal.Secret.from_dict({"AWS_ACCESS_KEY_ID": "1"}))
    with pytest.raises(
        InvalidRequestError, match=r"take 1 of the app's Secrets away.* \(st-.*from_name"
    ):
        lab.launch(1, executor, secrets={"HF_TOKEN": "huggingface"})
    assert lab.executor().list_runs() == []
    assert lab.launch(1, executor)


def test_an_environment_that_is_not_there_is_no_missing_app(lab):
    executor = lab.executor(environment_name="prod")
    with pytest.raises(
        InvalidRequestError, match=r"[^.]\. .*modal environment create prod"
    ) as caught:
        lab.launch(1, executor)
    assert "deploy" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "GB300"}, "known are T4, L4"),
        ({"gpu": "H100:9"}, "at most 8"),
        ({"gpu": "A10:5"}, "at most 4"),
        ({"timeout": None}, "timeout"),
        ({"timeout": 86_400}, "timeout"),
        ({"timeout": 40_000, "max_restarts": 2}, "needs a call of"),
        ({"cpu": "many"}, "number of CPUs"),
        ({"memory": "16 GiB"}, "amount of memory"),
        ({"gpu": "T4", "spot": False}, "spot=False"),
        ({"spot": False}, "spot=False"),
        ({"env": {"A": "x" * 5_000_000}}, "4194304 are allowed"),
    ],
)
def test_refused_before_the_first_call(lab, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        lab.launch(1, **options)
    assert not lab.world.calls()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "x"),
        ({1, 2}, "x"),
        (float("nan"), "x"),
        (b"bytes", "x"),
        ("x" * 5_000_000, "4194304 are allowed"),
    ],
    ids=["object", "set", "nan", "bytes", "too large"],
)
def test_arguments_that_cannot_travel_are_refused_before_the_first_call(lab, value, message):
    before = len(lab.stand_in.calls)
    with pytest.raises(InvalidRequestError, match=message):
        lab.executor().launch_replicas(1, "trainer:train", {"x": value}, run_id="run")
    assert len(lab.stand_in.calls) == before


@pytest.mark.parametrize(
    ("memory", "asked"),
    [
        ("16Gi", 16384),
        ("16G", 15258),
        ("512Mi", 512),
        ("512M", 488),
        ("1073741824", 1024),
        (" 1.5Gi ", 1536),
    ],
)
def test_memory_is_asked_for_in_mebibytes(lab, memory, asked):
    (request,) = lab.executor().plan(1, "trainer:train", memory=memory, timeout=60).requests
    assert request["options"]["memory"] == asked


@pytest.mark.parametrize("restarts", [0, 3])
def test_the_longest_timeout_is_allowed_and_a_longer_one_is_not(lab, restarts):
    executor = lab.executor(max_restarts=restarts, grace=20.0)
    longest = executor.capabilities.max_timeout
    (request,) = executor.plan(1, "trainer:train", timeout=longest).requests
    assert request["options"]["timeout"] == 86_400
    with pytest.raises(InvalidRequestError, match="timeout"):
        executor.plan(1, "trainer:train", timeout=longest + 1)


def test_a_region_and_a_cloud_are_asked_for(lab):
    (handle,) = lab.launch(1, lab.executor(region="us-east", cloud="aws"))
    options = lab.call(handle).options
    assert (options["regions"], options["cloud"]) == (["us-east"], "aws")


@pytest.mark.parametrize("value", ["us-east,us-west", "US East", "us_east", "-us", "ü"])
@pytest.mark.parametrize("name", ["region", "cloud"])
def test_a_place_that_is_not_one_name_is_refused(name, value):
    """Modal's client passes on any text."""
    with pytest.raises(InvalidRequestError, match=f"{name}=.* is not one name"):
        ModalSpawnExecutor(**{name: value})


@pytest.mark.parametrize("name", ["request_timeout", "pending_timeout"])
def test_no_time_at_all_is_refused(name):
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        ModalSpawnExecutor(**{name: 0})


def test_no_token(monkeypatch):
    def refuse():
        raise modal.exception.AuthError("Token missing.")

    monkeypatch.setattr(modal.Client, "from_env", refuse)
    executor = ModalSpawnExecutor()
    with pytest.raises(AuthError, match=r"Token missing\. Run 'modal token new'"):
        executor.launch_replicas(1, "trainer:train")
    assert [finding.ok for finding in executor.check(1, rendezvous_uri="s3://b")] == [False]


def test_a_handle_of_another_environment_is_refused(lab):
    (handle,) = lab.launch(1)
    lab.world.add_environment("other")
    words = "is of Modal's environment '', and this executor has environment_name='other'"
    with pytest.raises(InvalidRequestError, match=words):
        lab.executor(environment_name="other").describe(handle)


def test_a_server_that_does_not_answer(lab):
    executor = lab.executor(request_timeout=0.2, retry_timeout=0)
    (handle,) = lab.launch(1)
    lab.stand_in.faults.add("delay", verb="FunctionGetOutputs", resource="modal", seconds=3)
    with pytest.raises(UnavailableError, match=r"did not answer within 0\.2 s"):
        executor.describe(handle)


def test_the_plan_shows_no_secret(lab):
    plan = lab.executor().plan(
        1, "trainer:train", {"api_key": "abc"}, env={"HF_TOKEN": "def"}, run_id="run"
    )
    (request,) = plan.requests
    assert request["payload"]["env"] == {"HF_TOKEN": "<redacted>"}
    assert request["payload"]["spec"]["kwargs"] == {"api_key": "<redacted>"}
    assert not lab.world.calls()


def test_runs_of_the_same_options_do_not_wait_for_each_other(lab):
    lab.world.habits.auto_start = 1.0
    handles = [lab.launch(1, run_id=name)[0] for name in ("one", "two")]
    lab.world.advance(10)
    assert [lab.call(handle).status for handle in handles] == ["running", "running"]
    assert lab.call(lab.launch(1100)[0]).options["max_containers"] == 1100


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


@pytest.mark.parametrize("name", ["../..", "Über"])
def test_no_run_has_such_a_name(lab, name):
    executor = lab.executor()
    for verb in (executor.attach, executor.cancel_run):
        with pytest.raises(ReplicaNotFoundError):
            verb(name)
    with pytest.raises(InvalidRequestError, match="not None"):
        executor.cancel_run(None)
    assert not lab.stand_in.calls.count("DictGetOrCreate")


def test_a_line_that_a_container_did_not_finish_ends_with_it(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("first\nunfini")
    lab.call(handle).preempt()
    lab.world.advance(40)
    lab.call(handle).start()
    lab.call(handle).log("shed\nsecond\n")
    lines = ["first", "unfini", "shed", "second"]
    assert lab.executor().stream_logs(handle).split("\n") == lines
    assert list(lab.executor().log_iter(handle)) == lines


def test_what_arrives_after_the_end_is_followed_too(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("early\n")
    lab.finish(handle)
    pieces = ["", "l", "ate"]

    def sleep(seconds):
        lab.world.advance(seconds)
        if pieces and (piece := pieces.pop(0)):
            lab.call(handle).log(piece)

    executor = lab.executor(backoff=Backoff(clock=lab.world.now, sleep=sleep))
    assert list(executor.log_iter(handle, follow=True)) == ["early", "late"]


def test_a_handle_that_was_changed_finds_nothing(lab):
    (handle,) = lab.launch(1)
    executor = lab.executor()
    for other in (
        replace(handle, metadata={**handle.metadata, "function": "another"}),
        replace(handle, world_size=2),
    ):
        with pytest.raises(ReplicaNotFoundError):
            executor.describe(other)
        executor.cancel(other)
        executor.purge(other)
        assert executor.poll(handle) == "pending"


def test_a_log_is_followed_until_a_time_to_come(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("in time\n")
    lines = lab.executor().log_iter(handle, follow=True, until=lab.world.now() + 20)
    assert list(lines) == ["in time"]
    assert lab.executor().poll(handle) == "running"
