"""Launches over the scripted stand-in: all or nothing, the same launch again, interrupts."""

import os
import signal

import pytest
from modal_truth import told

from diloco_modal._client._client import Client
from diloco_protocol import (
    BackendError,
    ForbiddenError,
    LaunchError,
    Reason,
    ReplicaNotFoundError,
    RunConflictError,
)


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


def test_who_came_first_holds_the_rank(lab):
    handles = lab.launch(1)
    executor = lab.executor()
    lab.record().pop("call-0")
    lab.record().put("call-0", {"call": "fc-other"})
    with pytest.raises(ReplicaNotFoundError):
        executor.describe(handles[0])
    assert executor.attach("run")[0].metadata["function_call_id"] == "fc-other"


def test_a_launch_that_fails_leaves_nothing(lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", resource="modal", after=2, times=None)
    with pytest.raises(BackendError):
        lab.launch(4)
    assert {call.status for call in lab.world.calls()} <= {"terminated"}
    assert lab.executor().list_runs() == []
    lab.stand_in.faults.clear()
    assert len(lab.launch(4)) == 4


def test_a_launch_that_fails_leaves_alone_what_another_process_has_started(lab, monkeypatch):
    """Both launch the same run at once; the other one's call holds a rank, and must be found."""
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
    with pytest.raises(LaunchError, match="Permission denied") as caught:
        lab.launch(2)
    assert list(caught.value.survivors) == handles[:1]
    lab.stand_in.faults.clear()
    again = lab.launch(2)
    assert again[0] == handles[0]
    assert again[1] != handles[1]
    assert [lab.executor().poll(handle) for handle in again] == ["pending", "pending"]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("stuck", [False, True])
def test_ctrl_c_ends_what_was_started(lab, monkeypatch, stuck):
    """A note names what cannot be ended; ranks that were not started stay unclaimed."""
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
    with pytest.raises(LaunchError, match="2 calls of this launch may be running") as caught:
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


def test_runs_of_the_same_options_do_not_wait_for_each_other(lab):
    lab.world.habits.auto_start = 1.0
    handles = [lab.launch(1, run_id=name)[0] for name in ("one", "two")]
    lab.world.advance(10)
    assert [lab.call(handle).status for handle in handles] == ["running", "running"]
    # Nor do the calls of one run, if it has more of them than there are containers otherwise.
    for ranks, containers in ((2, 1000), (1001, 1001)):
        planned = lab.executor().plan(ranks, "train:main").requests
        assert {request["options"]["max_containers"] for request in planned} == {containers}
