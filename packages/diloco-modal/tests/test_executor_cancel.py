"""Cancels and stops over the scripted stand-in: what has ended, and what must be gone first."""

import modal
import pytest
from modal_truth import told

from diloco_modal._client._client import Client
from diloco_protocol import (
    BackendError,
    FolderJournal,
    Outcome,
    Reason,
    UnavailableError,
)


def test_the_grace_of_the_launch_counts_whoever_looks(lab):
    (handle,) = lab.launch(1, lab.executor(grace=25.0))
    lab.begin(handle)
    executor = lab.executor(grace=0.0)
    executor.cancel(handle)
    lab.world.advance(54)
    assert executor.poll(handle) == "running"
    lab.world.advance(2)
    assert executor.poll(handle) == "cancelled"


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
    for _ in range(2):
        lab.world.advance(4 * 86_400)
        assert lab.executor().exists("run")
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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("again", "attempt"), [(True, 2), (False, 1), (None, 1)], ids=["between", "within", "unknown"]
)
def test_stopped_from_outside_the_attempt_is_that_which_the_container_has_told(lab, again, attempt):
    """Only the container sees if Modal runs its call again; a later look cannot date the stop."""
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


@pytest.mark.sampled
@pytest.mark.parametrize("lives", [0, 1])
@pytest.mark.parametrize("outside", [False, True])
def test_a_container_that_begins_while_somebody_looks_is_not_gone(lab, monkeypatch, lives, outside):
    """Record read, container begun, call ended: only what has no container left is cancelled."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    if lives:
        lab.begin(handle)
        lab.call(handle).preempt()
        lab.record().put(
            "end-0-1", {"started": 1, "failed": 0, "at": lab.world.now(), "again": True}
        )
        lab.world.advance(2)
    plain, done = Client.end, []

    async def end(self, call_id, **options):
        if not done:
            done.append(call_id)
            lab.call(handle).start()
            lab.record().put(f"life-0-{lives + 1}", {"attempt": lives + 1, "at": lab.world.now()})
            if not outside:
                lab.record().put("cancel-0", {"by": "executor", "at": lab.world.now()})
            lab.call(handle).stop()
        return await plain(self, call_id, **options)

    monkeypatch.setattr(Client, "end", end)
    reason = Reason.STOPPED_EXTERNALLY if outside else Reason.CANCEL_REQUESTED
    assert told(executor.describe(handle)) == ("running", reason, lives + 1, True)
    assert told(lab.executor().describe(handle)) == ("running", reason, lives + 1, True)
    lab.world.advance(60)
    for each in (executor, lab.executor()):
        assert told(each.describe(handle)) == ("cancelled", reason, lives + 1, False)


def test_a_stop_from_outside(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).stop()
    assert told(executor.describe(handle)) == ("running", Reason.STOPPED_EXTERNALLY, 1, True)
    lab.world.advance(60)
    # Another executor knows since when it was stopped: the first one has written it down.
    assert told(lab.executor().describe(handle))[:2] == ("cancelled", Reason.STOPPED_EXTERNALLY)


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
    """The client tries each call four times; a mark left behind would say stopping for ever."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.stand_in.faults.add("server_error", verb="FunctionCallCancel", times=None)
    kind = "server_error" if verb == "DictPop" else "ambiguous"
    lab.stand_in.faults.add(kind, verb=verb, times=4)
    with pytest.raises(UnavailableError):
        executor.cancel(handle)
    assert told(executor.describe(handle)) == ("running", None, 1, False)


@pytest.mark.parametrize("verb", ["cancel", "cancel_run"])
def test_what_modal_does_not_end_because_it_has_ended_is_no_failure(lab, monkeypatch, verb):
    """Its container could not write down its end."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)

    def cancel(_, call_id):
        lab.call(handle).oom()
        raise BackendError("the call has ended")

    monkeypatch.setattr(Client, "cancel", cancel)
    getattr(executor, verb)(handle if verb == "cancel" else "run")
    assert told(lab.executor().describe(handle))[:2] == ("failed", Reason.OOM)
    assert lab.record().get("cancel-0") is None


@pytest.mark.parametrize("verb", ["cancel", "cancel_run"])
def test_a_cancel_that_came_to_nothing_is_not_the_time_of_the_next_one(lab, verb):
    """The canceller was killed before it asked Modal: the container is there 40 s more.

    They count from the cancel that was accepted.
    """
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.record().put("cancel-0", {"by": "executor", "at": lab.world.now(), "id": "theirs"})
    lab.world.advance(300)
    assert told(executor.describe(handle)) == ("running", Reason.CANCEL_REQUESTED, 1, True)
    for _ in range(2):
        getattr(executor, verb)(handle if verb == "cancel" else "run")
        assert lab.executor().poll(handle) == "running"
    assert [key for key in lab.record().items() if "cancel" in key] == ["cancel-0"]
    lab.world.advance(41)
    assert told(lab.executor().describe(handle))[:2] == ("cancelled", Reason.CANCEL_REQUESTED)


def test_a_cancel_does_not_pass_over_what_lives_on_without_its_record(lab):
    """Somebody has removed the Dict: nobody would know of a container that goes on."""
    handles = lab.launch(2)
    lab.begin(handles[0])
    lab.finish(handles[0])
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    lab.executor().cancel(handles[0])
    call = lab.call(handles[1]).call_id
    for verb in ("cancel", "purge"):
        with pytest.raises(BackendError, match=f"has not ended, and may cost money: .*{call}"):
            getattr(lab.executor(), verb)(handles[1])
    lab.call(handles[1]).stop()
    lab.executor().cancel(handles[1])
    lab.executor().purge(handles[1])


def test_a_cancel_does_not_pass_over_what_lives_on_beside_a_later_run_of_its_name(lab):
    """Somebody has removed the Dict while the run was under way, and launched again."""
    (old,) = lab.launch(1)
    lab.begin(old)
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    (new,) = lab.launch(1)
    call = lab.call(old).call_id
    with pytest.raises(
        BackendError, match=f"does not name the call of this handle.* may cost money: .*{call}"
    ):
        lab.executor().cancel(old)
    lab.call(old).stop()
    lab.executor().cancel(old)
    assert lab.executor().poll(new) == "pending"


def test_a_cancel_without_a_record_does_not_take_an_error_of_the_client_for_an_end(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.world.call(handle.metadata["function_call_id"]).start()
    executor._client.delete_record("run", executor._client.record("run"))
    lab.stand_in.faults.add("server_error", verb="FunctionGetOutputs", times=None)
    with pytest.raises(UnavailableError, match="looking at the call"):
        executor.cancel(handle)


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancel_whose_answer_was_lost_is_that_of_who_asked(lab, monkeypatch, times):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    plain, lost = Client.cancel, []

    def cancel(self, call_id):
        plain(self, call_id)
        if len(lost) < times:
            lost.append(call_id)
            raise UnavailableError("the answer was lost")

    monkeypatch.setattr(Client, "cancel", cancel)
    executor.cancel(handle)
    assert len(lost) == times
    assert told(lab.executor().describe(handle)) == ("running", Reason.CANCEL_REQUESTED, 1, True)


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
    before = len(lab.stand_in.calls.requests())
    lab.executor().cancel_run("run")
    called = [call.verb for call in lab.stand_in.calls.requests()[before:]]
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
