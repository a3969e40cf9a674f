"""Containers that start by themselves, and what keeps them waiting."""

from __future__ import annotations

import pytest

from diloco_localcloud import ModalStandIn


def states(lab):
    lab.world.settle()
    return [call.status for call in lab.world.calls()]


def test_they_start_and_end_by_themselves(lab):
    lab.world.habits.auto_start, lab.world.habits.auto_end = 1.0, 10.0
    call, scripted = lab.spawn()
    lab.world.advance(1)
    assert scripted.status == "running"
    lab.world.advance(10)
    assert call.get(timeout=0) is None


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


def test_gpus_that_are_not_there(lab):
    habits = lab.world.habits
    habits.auto_start, habits.no_gpus, habits.gpu_waits = 1.0, {"B200"}, {"H100": 600.0}
    for gpu in ("B200", "H100", "T4"):
        lab.function.with_options(gpu=gpu).spawn()
    lab.world.advance(2)
    assert [call.status for call in lab.world.calls()] == ["pending", "pending", "running"]
    lab.world.advance(600)
    assert lab.world.calls()[1].status == "running"
    habits.no_gpus.clear()
    lab.world.advance(1)
    assert lab.world.calls()[0].status == "running"


def test_a_preempted_call_starts_again_by_itself(lab):
    lab.world.habits.auto_start = 5.0
    _, scripted = lab.spawn()
    lab.world.advance(5)
    scripted.preempt()
    lab.world.advance(5)
    assert (scripted.status, scripted.attempt) == ("pending", 1)
    lab.world.advance(1)
    assert (scripted.status, scripted.attempt) == ("running", 2)


def test_a_program_that_plays_the_container(lab):
    held = lab.dict("run")
    held["launch"] = 1

    def program(call):
        (rank,), _ = call.arguments
        lab.world.dict("run").put(f"life-{rank}-{call.attempt}", call.call_id)
        if call.attempt == 2:
            call.end(f"rank {rank}")

    lab.world.on_start(program)
    call, scripted = lab.spawn(3)
    scripted.start()
    scripted.preempt()
    lab.world.settle()
    scripted.start()
    assert call.get(timeout=0) == "rank 3"
    assert held["life-3-1"] == held["life-3-2"] == call.object_id
    lab.world.on_start(None)
    _, quiet = lab.spawn(4)
    quiet.start()
    assert quiet.status == "running"


def test_steps_of_the_clock(lab):
    lab.world.habits.auto_start = 3.0
    assert not lab.world.step()
    lab.spawn()
    before = lab.world.now()
    assert lab.world.step()
    assert lab.world.now() == before + 3
    assert states(lab) == ["running"]


def test_in_real_time_nobody_moves_the_clock():
    with ModalStandIn(real_time=True) as stand_in:
        for move in (lambda: stand_in.world.advance(1), stand_in.world.settle, stand_in.world.step):
            with pytest.raises(ValueError, match="its clock cannot be moved"):
                move()
