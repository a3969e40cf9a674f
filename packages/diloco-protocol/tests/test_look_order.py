"""Of two looks at once, the one that began later is the newer, whichever comes back first."""

import threading

import pytest
from memory_lab import Memory

from diloco_protocol import ReplicaHandle, ReplicaState, ReplicaStatus
from diloco_protocol._recent import LookOrder

HANDLE = ReplicaHandle(0, "memory", run_id="r")
PENDING, RUNNING = (ReplicaStatus(state) for state in (ReplicaState.PENDING, ReplicaState.RUNNING))


@pytest.fixture
def order():
    return LookOrder()


def test_what_a_newer_look_has_told_stays(order):
    with order.look() as older:
        with order.look() as newer:
            assert order.newest(newer, HANDLE, RUNNING) is RUNNING
        assert order.newest(older, HANDLE, PENDING) is RUNNING


def test_a_newer_look_is_not_held_back_by_an_older_one(order):
    with order.look() as older, order.look() as newer:
        assert order.newest(older, HANDLE, PENDING) is PENDING
        assert order.newest(newer, HANDLE, RUNNING) is RUNNING


def test_nothing_is_kept_once_no_older_look_is_under_way(order):
    with order.look() as older:
        with order.look() as newer:
            order.newest(newer, HANDLE, RUNNING)
        assert order._told
        with pytest.raises(ValueError, match="broken"), order.look():
            raise ValueError("broken")
        order.newest(older, HANDLE, PENDING)
    assert not order._told
    with order.look() as alone:
        assert order.newest(alone, HANDLE, PENDING) is PENDING
    assert not order._told


def test_an_executor_puts_the_looks_of_its_threads_in_order():
    """The older look saw the replica wait, and returns after the newer one says that it runs."""
    seen, told = threading.Event(), threading.Event()

    class Slow(Memory):
        def _observe_run(self, handles):
            statuses = super()._observe_run(handles)
            if threading.current_thread() is older:
                seen.set()
                assert told.wait(60)
            return statuses

    world = {HANDLE: PENDING}
    executor, answers = Slow(world), []
    older = threading.Thread(target=lambda: answers.append(executor.poll(HANDLE)))
    older.start()
    assert seen.wait(60)
    world[HANDLE] = RUNNING
    answers.append(executor.poll(HANDLE))
    told.set()
    older.join(60)
    assert answers == ["running", "running"]
