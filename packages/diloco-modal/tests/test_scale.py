"""What many ranks cost: calls are counted. How long they take: ``benchmarks/scale.py``."""

import asyncio
import contextlib
import threading
from collections import Counter

import pytest

from diloco_localcloud._modal._workspace._dicts import Dict
from diloco_localcloud._modal._workspace._refused import RefusedError
from diloco_modal._client._event_loop import AT_ONCE, ask, at_once, patiently
from diloco_protocol import (
    BackendError,
    Backoff,
    LaunchError,
    ReplicaNotFoundError,
    UnavailableError,
)

RANKS = 200


def counted(lab, act):
    """How many requests there were of each RPC meanwhile."""
    before = len(lab.stand_in.calls.requests())
    act()
    return Counter(call.verb for call in lab.stand_in.calls.requests()[before:])


def test_a_launch_is_a_start_and_an_entry_for_each_rank(lab):
    executor = lab.executor()
    calls = counted(lab, lambda: lab.launch(RANKS, executor))
    assert (calls["FunctionMap"], calls["DictUpdate"]) == (RANKS, RANKS + 1)
    assert (calls["DictGet"], calls["FunctionBindParams"]) == (0, 1)
    assert calls.total() == 2 * RANKS + 7


def test_a_look_asks_once_for_each_rank_that_has_not_ended(lab):
    executor = lab.executor()
    handles = lab.launch(RANKS, executor)
    look = {"DictLen": 1, "FunctionGetOutputs": RANKS}
    assert counted(lab, lambda: executor.collect(handles, timeout=0)) == look
    elsewhere = lab.executor()
    first = counted(lab, lambda: elsewhere.collect(handles, timeout=0))
    once = {"EnvironmentGetOrCreate": 1, "DictGetOrCreate": 1, "DictContents": 1}
    assert first == {**look, **once}
    for handle in handles[:150]:
        lab.begin(handle)
        lab.finish(handle, handle.rank)
    changed = counted(lab, lambda: executor.collect(handles, timeout=0))
    assert (changed["DictContents"], changed["FunctionGetOutputs"]) == (1, RANKS)
    after = counted(lab, lambda: executor.collect(handles, timeout=0))
    assert after == {"DictLen": 1, "FunctionGetOutputs": 50}
    lab.world.advance(60)
    later = counted(lab, lambda: executor.collect(handles, timeout=0))
    assert later == {**after, "DictGetOrCreate": 1, "DictContents": 1}


def test_a_run_that_has_ended_costs_nothing(lab):
    executor = lab.executor()
    handles = lab.launch(3, executor)
    for handle in handles:
        lab.begin(handle)
        lab.finish(handle, handle.rank)
    assert [each["result"] for each in executor.collect(handles)] == [0, 1, 2]
    assert not counted(lab, lambda: executor.collect(handles))


def test_a_record_is_read_again_after_a_minute(lab):
    """One entry may have gone and another come."""
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    assert executor.poll(handle) == "pending"
    lab.record().put("life-0-1", {"attempt": 1, "at": lab.world.now()})
    lab.record().pop("launch")
    assert executor.poll(handle) == "pending"
    lab.world.advance(60)
    with pytest.raises(ReplicaNotFoundError, match="is empty"):
        executor.poll(handle)


@pytest.mark.parametrize("empty", [False, True])
def test_a_record_that_was_made_anew_under_the_same_name_is_found(lab, monkeypatch, empty):
    """By whoever had found the former one: it has another id.

    Modal may also say of that one that it is empty.
    """
    dicts = lab.stand_in._workspace.dicts
    by_id = dicts.by_id

    def lenient(dict_id):
        with contextlib.suppress(RefusedError):
            return by_id(dict_id)
        return Dict(dict_id, "", "", 0.0)

    if empty:
        monkeypatch.setattr(dicts, "by_id", lenient)
    executor, other = lab.executor(), lab.executor()
    (old,) = lab.launch(1, executor)
    assert executor.poll(old) == "pending"
    other.cancel(old)
    other.purge(old)
    with pytest.raises(ReplicaNotFoundError):
        executor.poll(old)
    lab.begin(lab.launch(1, other)[0])
    (new,) = executor.attach("run")
    assert new != old
    assert executor.poll(new) == "running"
    lab.record().pop("launch")
    lab.world.advance(60)
    with pytest.raises(ReplicaNotFoundError, match="is empty"):
        executor.poll(new)


def test_a_launch_that_is_throttled_goes_on(lab):
    lab.stand_in.faults.add("throttle", verb="FunctionMap", times=40)
    lab.stand_in.faults.add("throttle", verb="DictUpdate", times=40, after=20)
    assert len(lab.launch(60, lab.executor(retry_timeout=600))) == 60
    assert len(lab.world.calls()) == 60


def test_a_launch_that_fails_half_way_starts_no_more(lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", times=None, after=100)
    with pytest.raises(BackendError) as caught:
        lab.launch(RANKS)
    assert not isinstance(caught.value, LaunchError)
    assert len(lab.world.calls()) == 100
    assert {call.status for call in lab.world.calls()} == {"terminated"}
    assert lab.stand_in.calls.count("FunctionMap") <= 100 + AT_ONCE


async def away(item=0):
    raise UnavailableError("for a moment")


def no_loop():
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    "call", [lambda: ask(away, 1.0, ""), lambda: at_once(away, [1])], ids=["ask", "at_once"]
)
def test_where_no_file_descriptor_is_left_modal_is_away(monkeypatch, call, within):
    async def caller():
        monkeypatch.setattr(asyncio.events, "new_event_loop", no_loop)
        return call() if within else await asyncio.to_thread(call)

    with pytest.raises(UnavailableError, match="Too many open files"):
        asyncio.run(caller())


def test_what_is_tried_again_may_find_no_file_descriptor(monkeypatch):
    async def caller():
        monkeypatch.setattr(asyncio.events, "new_event_loop", no_loop)
        await patiently(away, Backoff(), 0.0)

    with pytest.raises(UnavailableError, match="Too many open files"):
        asyncio.run(caller())


class TestAtOnce:
    def test_in_order_and_also_for_nothing(self):
        async def work(item):
            return item * 2

        assert at_once(work, []) == []
        assert at_once(work, range(100)) == [2 * item for item in range(100)]

    def test_where_an_event_loop_runs(self):
        async def work(item):
            return threading.current_thread().name

        async def caller():
            return at_once(work, [1])

        assert asyncio.run(caller()) != [threading.current_thread().name]

    def test_what_is_under_way_is_waited_for(self):
        done = []

        async def work(item):
            if item == 3:
                raise UnavailableError("gone")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            done.append(item)

        with pytest.raises(UnavailableError):
            at_once(work, range(1000))
        assert done == [item for item in range(AT_ONCE) if item != 3]
