"""Launches that ended when they had a record, and before they had started a call."""

import os
import signal

import pytest

from diloco_modal._client._client import Client
from diloco_protocol import BackendError, ReplicaNotFoundError, RunConflictError


@pytest.fixture
def begun(lab):
    """A launcher was killed when it had written down its launch."""
    handles = lab.launch(2)
    for handle in handles:
        lab.call(handle).stop()
        lab.record().pop(f"call-{handle.rank}")
    return lab


def pending(lab):
    return [call.call_id for call in lab.world.calls() if call.status == "pending"]


def test_the_same_launch_simply_starts(begun):
    handles = begun.launch(2)
    assert [handle.metadata["function_call_id"] for handle in handles] == pending(begun)
    assert begun.executor().attach("run") == handles


def test_another_launch_is_told_how_the_name_becomes_free(begun):
    words = (
        r"which has started nothing yet: repeat it as it was, or cancel_run\('run'\) frees the name"
    )
    with pytest.raises(RunConflictError, match=words):
        begun.launch(3)
    begun.executor().cancel_run("run")
    assert begun.executor().list_runs() == []
    assert len(begun.launch(3)) == len(pending(begun)) == 3


def test_what_is_said_of_it_is_true(begun):
    executor = begun.executor()
    assert executor.list_runs() == ["run"]
    words = r"no replica was started yet: .* Launch it again, or free its name: cancel_run\('run'\)"
    with pytest.raises(ReplicaNotFoundError, match=words):
        executor.attach("run")
    executor.cancel_run("run")
    assert executor.list_runs() == []
    for verb in (executor.attach, executor.cancel_run):
        with pytest.raises(ReplicaNotFoundError, match="there is no record of the run 'run'"):
            verb("run")


def test_handles_of_a_run_that_was_purged_do_not_reach_it(lab):
    (old,) = lab.launch(1)
    lab.executor().cancel(old)
    lab.executor().purge(old)
    lab.launch(1)
    lab.record().pop("call-0")
    executor = lab.executor()
    executor.purge(old)
    executor.cancel(old)
    with pytest.raises(ReplicaNotFoundError):
        executor.describe(old)
    assert set(lab.record().items()) == {"launch"}


def test_a_name_that_was_kept_by_a_launch_whose_ranks_are_void_becomes_free(begun):
    """A launch could not be taken back, and who had begun it is gone."""
    for rank in range(2):
        begun.record().put(f"call-{rank}", {"call": ""})
    words = r"was cancelled before rank 0 was started: cancel_run\('run'\) frees the name"
    with pytest.raises(RunConflictError, match=words):
        begun.launch(2)
    begun.executor().cancel_run("run")
    assert len(begun.launch(2)) == 2


def test_a_call_that_claims_its_rank_meanwhile_is_found_and_ended(begun, monkeypatch):
    """Its launcher lost the answer, so nobody else knows it."""
    plain, call = Client.hold, begun.world.calls()[1].call_id

    async def hold(self, record, key, value):
        if key == "call-1":
            begun.record().put(key, {"call": call}, skip_if_exists=True)
        return await plain(self, record, key, value)

    monkeypatch.setattr(Client, "hold", hold)
    begun.executor().cancel_run("run")
    assert [each.metadata["function_call_id"] for each in begun.executor().attach("run")] == [call]
    assert begun.record().get("cancel-1")["by"] == "executor"


def test_a_launcher_that_comes_back_when_its_name_was_freed_starts_nothing(begun, monkeypatch):
    plain, freed = Client.spawn, []

    async def spawn(self, function, payload):
        if not freed:
            freed.append(begun.record().get("launch"))
            begun.record().pop("launch")
            held = begun.executor()._client.record("run")
            begun.executor()._client.delete_record("run", held)
        return await plain(self, function, payload)

    monkeypatch.setattr(Client, "spawn", spawn)
    with pytest.raises(BackendError):
        begun.launch(2)
    assert pending(begun) == []


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_the_launch_is_written_down(lab, monkeypatch):
    plain, done = Client.put_once, []

    def put_once(self, record, key, value):
        answer = plain(self, record, key, value)
        if key == "launch" and not done:
            done.append(key)
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    monkeypatch.setattr(Client, "put_once", put_once)
    with pytest.raises(KeyboardInterrupt):
        lab.launch(2)
    assert lab.world.calls() == []
    assert len(lab.launch(2)) == 2
