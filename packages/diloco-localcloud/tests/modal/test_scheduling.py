"""Containers that start by themselves, and what keeps them waiting."""

from __future__ import annotations


def states(lab):
    lab.world.settle()
    return [call.status for call in lab.world.calls()]


def test_max_containers(lab):
    lab.world.habits.auto_start = 1.0
    bound = lab.function.with_options(max_containers=2)
    for _ in range(3):
        bound.spawn()
    lab.world.advance(60)
    assert [call.status for call in lab.world.calls()] == ["running", "running", "pending"]
    lab.world.calls()[0].end()
    lab.world.advance(2)
    assert [call.status for call in lab.world.calls()] == ["success", "running", "running"]


def test_a_cancelled_call_keeps_its_place_until_its_container_is_gone(lab):
    lab.world.habits.auto_start = 1.0
    bound = lab.function.with_options(max_containers=1)
    first, second = bound.spawn(), bound.spawn()
    lab.world.advance(1)
    scripted = lab.world.call(first.object_id)
    scripted.on_interrupt(20)
    first.cancel(terminate_containers=True)
    lab.world.advance(19)
    assert lab.world.call(second.object_id).status == "pending"
    lab.world.advance(3)
    assert lab.world.call(second.object_id).status == "running"


def test_a_preempted_call_starts_again_by_itself(lab):
    lab.world.habits.auto_start = 5.0
    _, scripted = lab.spawn()
    lab.world.advance(5)
    scripted.preempt()
    lab.world.advance(5)
    assert (scripted.status, scripted.attempt) == ("pending", 1)
    lab.world.advance(1)
    assert (scripted.status, scripted.attempt) == ("running", 2)


def test_steps_of_the_clock(lab):
    lab.world.habits.auto_start = 3.0
    assert not lab.world.step()
    lab.spawn()
    before = lab.world.now()
    assert lab.world.step()
    assert lab.world.now() == before + 3
    assert states(lab) == ["running"]
