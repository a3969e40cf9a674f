"""Launches that fail, are interrupted, meet others of their name, or wake up late."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest

from diloco_modal._client import _event_loop as loop
from diloco_modal._client._client import Client
from diloco_protocol import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    RunConflictError,
    UnavailableError,
)

AGREED = [
    {"app": "other"},
    {"function": "trainer"},
    {"app_secrets": ["bucket"]},
    {"region": "us-east"},
    {"cloud": "aws"},
    {"pending_timeout": 60},
    {"grace": 5},
    {"env": {"A": "1"}},
    {"max_restarts": 1},
]
ASKED = [
    {"n": 1},
    {"gpu": "H100"},
    {"timeout": 601},
    {"cpu": 2},
    {"memory": "1Gi"},
    {"env": {"A": "1"}},
    {"secrets": {"KEY": "held"}},
    {"labels": {"a": "b"}},
    {"spot": True},
    {"max_restarts": 1},
    {"rank_offset": 1, "world_size": 3},
    {"world_size": 3},
    {"cohort": "another"},
]


def test_another_launch_of_that_name_is_refused_whatever_it_differs_in(lab):
    lab.world.deploy("other", ["replica"])
    lab.world.deploy("diloco", ["replica", "trainer"])
    lab.world.add_secret("held", {"KEY": "1"})
    handles = lab.launch(2)
    for chosen, asked in [*((each, {}) for each in AGREED), *(({}, each) for each in ASKED)]:
        with pytest.raises(RunConflictError, match="another launch of the name 'run'"):
            lab.launch(executor=lab.executor(**chosen), **{"n": 2, **asked})
    assert len(lab.world.calls()) == 2
    assert lab.launch(2, lab.executor(retry_timeout=1, request_timeout=20)) == handles


def meanwhile(monkeypatch, rank, action):
    """Do something once, after the call of a rank was started, and before that is written down."""
    plain, done = Client.spawn, threading.Event()

    async def spawn(self, function, payload):
        call = await plain(self, function, payload)
        if payload["rank"] == rank and not done.is_set():
            done.set()
            # The action asks Modal, too, and has an event loop of its own.
            thread = threading.Thread(target=action)
            thread.start()
            thread.join()
        return call

    monkeypatch.setattr(Client, "spawn", spawn)


def test_a_launcher_that_wakes_up_late_leaves_the_next_run_of_its_name_alone(lab, monkeypatch):
    later = []

    def purged_and_launched_again():
        lab.executor()._client.delete_record("run", lab.executor()._client.record("run"))
        later.extend(lab.launch(2))

    meanwhile(monkeypatch, 1, purged_and_launched_again)
    with pytest.raises(BackendError):
        lab.launch(2)
    assert lab.executor().attach("run") == later
    held = {handle.metadata["function_call_id"] for handle in later}
    assert {c.call_id for c in lab.world.calls() if c.status == "pending"} == held


def test_a_launch_that_fails_keeps_the_record_of_what_another_launcher_has_started(
    lab, monkeypatch
):
    monkeypatch.setattr(loop, "AT_ONCE", 1)
    theirs = []
    meanwhile(monkeypatch, 0, lambda: theirs.extend(lab.launch(2)))
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", after=3, times=None)
    with pytest.raises(LaunchError, match="may be running") as caught:
        lab.launch(2)
    assert list(caught.value.survivors) == theirs
    assert lab.executor().attach("run") == theirs
    held = {handle.metadata["function_call_id"] for handle in theirs}
    assert {call.call_id for call in lab.world.calls() if call.status == "pending"} == held


@pytest.mark.sampled
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("error", [BackendError, KeyboardInterrupt])
def test_what_a_killed_launcher_has_started_is_named_when_its_launch_fails_again(
    lab, monkeypatch, rank, error
):
    monkeypatch.setattr(loop, "AT_ONCE", 1)
    first = lab.launch(4)[:2]
    for number in (2, 3):
        lab.record().pop(f"call-{number}")
    plain = Client.spawn

    async def spawn(self, function, payload):
        if payload["rank"] == rank:
            raise error("no such GPU")
        return await plain(self, function, payload)

    monkeypatch.setattr(Client, "spawn", spawn)
    with pytest.raises((LaunchError, KeyboardInterrupt)) as caught:
        lab.launch(4)
    if error is BackendError:
        assert list(caught.value.survivors) == first
        assert str(caught.value).startswith("no such GPU. 2 calls of this launch may be running")
    else:
        assert all(lab.call(handle).call_id in caught.value.__notes__[0] for handle in first)
    assert [lab.call(handle).status for handle in first] == ["pending"] * 2
    assert [call.status for call in lab.world.calls()[4:]] == ["terminated"] * (rank - 2)


def test_a_launch_whose_ranks_are_void_names_what_an_earlier_try_of_it_has_left(lab):
    """Who took it back, or cancelled it, was killed before a call was ended."""
    handles = lab.launch(4)
    for handle in handles[2:]:
        lab.record().put(f"call-{handle.rank}", {"call": ""})
    lab.begin(handles[1])
    lab.finish(handles[1])
    words = (
        r"cancelled before rank 2 was started: choose another run_id\. 1 calls .* may be running"
    )
    with pytest.raises(LaunchError, match=words) as caught:
        lab.launch(4)
    assert caught.value.survivors == (handles[0],)
    with pytest.raises(RunConflictError, match="another launch of the name 'run'"):
        lab.launch(3)
    lab.executor().cancel(handles[0])
    with pytest.raises(RunConflictError, match=r"choose another run_id$"):
        lab.launch(4)


@pytest.mark.sampled
@pytest.mark.parametrize("ended", ["cancelled", "failed", "succeeded"])
def test_a_run_of_which_a_rank_was_ended_or_has_failed_is_not_completed(lab, ended):
    """The other ranks would wait for it.

    One that was quick may be that of a launcher which is still at work.
    """
    first = lab.launch(4)[:2]
    for number in (2, 3):
        lab.record().pop(f"call-{number}")
    if ended == "cancelled":
        lab.executor().cancel(first[1])
    else:
        lab.begin(first[1])
        lab.finish(first[1], code=int(ended == "failed"))
    if ended == "succeeded":
        assert lab.launch(4)[:2] == first
        return
    words = (
        r"^rank [01] of an earlier try .* rank 2 was not started: .*cancel_run\('run'\), and purge"
    )
    with pytest.raises(LaunchError, match=words) as caught:
        lab.launch(4)
    assert caught.value.survivors == (first[0],)
    lab.executor().cancel(first[0])
    with pytest.raises(RunConflictError, match=words):
        lab.launch(4)
    assert len(lab.world.calls()) == 4
    lab.executor().cancel_run("run")
    lab.executor().purge(first[0])
    assert len(lab.launch(4)) == 4


def test_a_launch_whose_secret_is_gone_names_what_an_earlier_try_of_it_has_left(lab):
    lab.world.add_secret("held", {"KEY": "1"})
    asked = {"secrets": {"KEY": "held"}}
    (handle,) = lab.launch(1, **asked)
    lab.world.add_secret("held", {"OTHER": "1"})
    with pytest.raises(LaunchError, match=r"KEY.* 1 calls of this launch may be running") as caught:
        lab.launch(1, **asked)
    assert caught.value.survivors == (handle,)
    for again in ({"run_id": "new"}, {"timeout": 601}):
        with pytest.raises((InvalidRequestError, RunConflictError)) as plain:
            lab.launch(1, **asked, **again)
        assert handle.metadata["function_call_id"] not in str(plain.value)
    assert lab.executor().list_runs() == ["run"]
    assert lab.call(handle).status == "pending"


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_when_only_the_record_was_made(lab, monkeypatch, again):
    """It is removed, or its name is told."""
    plain, interrupts = Client.put_once, []

    def put_once(self, record, key, value):
        written = plain(self, record, key, value)
        if again or not interrupts:
            interrupts.append(key)
            os.kill(os.getpid(), signal.SIGINT)
        return written

    monkeypatch.setattr(Client, "put_once", put_once)
    with pytest.raises(KeyboardInterrupt) as caught:
        lab.launch(2)
    monkeypatch.undo()
    notes = getattr(caught.value, "__notes__", [])
    assert [("cancel_run('run') removes it" in note) for note in notes] == [True] * again
    assert lab.executor().list_runs() == ["run"] * again
    if again:
        lab.executor().cancel_run("run")
        assert lab.executor().list_runs() == []


def test_a_call_that_has_begun_though_its_answer_was_lost_is_named(lab, monkeypatch):
    plain = Client.spawn

    async def spawn(self, function, payload):
        call = await plain(self, function, payload)
        lab.record().put("call-0", {"call": call}, skip_if_exists=True)  # its container is quick
        raise BackendError("the answer was lost")

    monkeypatch.setattr(Client, "spawn", spawn)
    with pytest.raises(LaunchError) as caught:
        lab.launch(1)
    monkeypatch.undo()
    (survivor,) = caught.value.survivors
    lab.begin(survivor)
    lab.executor().cancel(survivor)
    assert lab.call(survivor).status == "terminated"


def test_what_cannot_be_written_down_is_ended_all_the_same(lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", after=2, times=None)
    lab.stand_in.faults.add("forbidden", verb="DictUpdate", after=3, times=None)
    with pytest.raises(BackendError):
        lab.launch(4)
    assert {call.status for call in lab.world.calls()} <= {"terminated"}
    # Whether anybody has claimed the ranks that were not started is not known: the record is needed
    # to find out.
    assert lab.executor().list_runs() == ["run"]


def test_a_call_that_modal_says_not_to_know_when_it_is_taken_back_is_named(lab, monkeypatch):
    plain = Client.spawn

    async def spawn(self, function, payload):
        call = await plain(self, function, payload)
        lab.stand_in._workspace.calls._calls.pop(call)
        return call

    monkeypatch.setattr(loop, "AT_ONCE", 1)
    monkeypatch.setattr(Client, "spawn", spawn)
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", after=1, times=None)
    with pytest.raises(LaunchError, match="1 calls of this launch may be running") as caught:
        lab.launch(2)
    assert [each.rank for each in caught.value.survivors] == [0]


def test_the_time_to_try_again_is_that_of_all_calls_together(lab, monkeypatch):
    tried = []

    def cancel(_, call_id):
        tried.append(call_id)
        raise UnavailableError("away")

    monkeypatch.setattr(loop, "AT_ONCE", 1)
    monkeypatch.setattr(Client, "cancel", cancel)
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", after=4, times=None)
    before = lab.world.now()
    with pytest.raises(LaunchError) as caught:
        lab.launch(6, lab.executor(retry_timeout=5))
    assert len(caught.value.survivors) == 4
    assert lab.world.now() - before < 10
    assert len(set(tried)) == 1


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_names_what_is_left(lab, monkeypatch):
    monkeypatch.setattr(loop, "AT_ONCE", 1)
    plain, cancel, calls = Client.spawn, Client.cancel, []

    async def spawn(self, function, payload):
        calls.append(await plain(self, function, payload))
        if payload["rank"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return calls[-1]

    def interrupted(self, call_id):
        if call_id == calls[1]:
            os.kill(os.getpid(), signal.SIGINT)
            raise ForbiddenError("no")
        cancel(self, call_id)

    monkeypatch.setattr(Client, "spawn", spawn)
    monkeypatch.setattr(Client, "cancel", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        lab.launch(4)
    (note,) = caught.value.__notes__
    assert "calls of this launch may be running, and cost money" in note
    assert calls[1] in note
    assert calls[0] not in note


def test_a_second_ctrl_c_leaves_no_call_that_was_being_started(lab, monkeypatch):
    """It does not wait for what is under way, which learns that the launch was taken back."""
    plain, delete, at_once = Client.spawn, Client.delete_record, loop.at_once
    taken_back, threads = threading.Event(), []

    async def spawn(self, function, payload):
        await asyncio.to_thread(taken_back.wait, 60)
        return await plain(self, function, payload)

    def delete_record(*told):
        delete(*told)
        taken_back.set()

    def go_on(*told):
        with contextlib.suppress(BackendError):
            at_once(*told)

    def not_waited_for(*told):
        if threads:
            return at_once(*told)
        threads.append(threading.Thread(target=go_on, args=told))
        threads[0].start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "spawn", spawn)
    monkeypatch.setattr(Client, "delete_record", delete_record)
    monkeypatch.setattr(loop, "at_once", not_waited_for)
    with pytest.raises(KeyboardInterrupt):
        lab.launch(4)
    threads[0].join()
    assert [call.status for call in lab.world.calls()] == ["terminated"] * 4
    assert lab.executor().list_runs() == []


def test_a_purge_lets_nobody_claim_a_rank_behind_it(lab, monkeypatch):
    """A call that claims its rank before the record is removed would train and not be found."""
    handles = lab.launch(2)
    lab.record().pop("call-1")
    lab.begin(handles[0])
    lab.finish(handles[0])
    plain = Client.hold

    async def hold(self, record, key, value):
        if key == "call-1":
            lab.record().put("call-1", {"call": handles[1].metadata["function_call_id"]})
        return await plain(self, record, key, value)

    monkeypatch.setattr(Client, "hold", hold)
    with pytest.raises(InvalidRequestError, match="have not ended, such as rank 1"):
        lab.executor().purge(handles[0])
    assert lab.executor().attach("run") == handles


def test_ranks_that_are_started_later_have_their_whole_time_to_get_a_container(lab):
    """A killed launcher's launch is repeated hours later; its containers were never awaited."""
    first = lab.launch(2, lab.executor(pending_timeout=600))
    lab.record().pop("call-1")
    lab.world.advance(7200)
    again = lab.launch(2, lab.executor(pending_timeout=600))
    assert again[0] == first[0]
    told = [lab.call(handle).arguments[0][0]["start_by"] for handle in again]
    assert told[1] == lab.world.now() + 600
    assert told[1] - told[0] == pytest.approx(7200)


def test_a_record_that_may_have_faded_in_part_starts_nothing(lab):
    """Entries fade each on their own: a rank that no call holds may have been trained."""
    handles = lab.launch(2)
    lab.world.advance(6 * 86_400 - 60)
    assert lab.launch(2) == handles
    lab.record().pop("call-1")
    lab.world.advance(120)
    words = r"6\.0 days ago.* what became of rank 1"
    with pytest.raises(LaunchError, match=words) as caught:
        lab.launch(2)
    assert caught.value.survivors == (handles[0],)
    assert len(lab.world.calls()) == 2
    lab.executor().cancel(handles[0])
    with pytest.raises(RunConflictError, match=words):  # nothing is left
        lab.launch(2)
    assert lab.executor().attach("run") == handles[:1]
