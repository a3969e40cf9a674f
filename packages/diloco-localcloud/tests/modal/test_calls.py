"""Calls of functions, by the real client: their starts and their ends."""

from __future__ import annotations

import threading

import modal
import pytest
from modal import exception

DAY = 86400


def test_what_a_call_goes_through(lab):
    call, scripted = lab.spawn(1, 2, word="three")
    assert scripted.arguments == ((1, 2), {"word": "three"})
    assert (scripted.app, scripted.function, scripted.attempt) == ("app", "function", 0)
    assert lab.pending(call)
    assert lab.graph(call) == ("PENDING", "")
    scripted.start()
    assert (scripted.status, scripted.attempt) == ("running", 1)
    assert lab.pending(call)
    assert lab.graph(call)[1].startswith("ta-")
    scripted.end({"loss": 0.5})
    assert call.get(timeout=0) == {"loss": 0.5}
    assert lab.graph(call)[0] == "SUCCESS"
    assert not scripted.has_container


def test_from_id_finds_it_again(lab):
    call, scripted = lab.spawn()
    again = modal.FunctionCall.from_id(call.object_id, client=lab.client)
    scripted.start()
    scripted.end(7)
    assert again.get(timeout=0) == 7
    assert again.num_inputs() == 1


def test_get_waits_until_the_end(lab):
    call, scripted = lab.spawn()
    scripted.start()
    # The one that waits looks first, and is woken by the change: the timer only makes the change
    # come second.
    timer = threading.Timer(0.05, scripted.end, ["late"])
    timer.start()
    assert call.get(timeout=600) == "late"
    timer.join()
    assert lab.stand_in.calls.count("FunctionGetOutputs") == 1


@pytest.mark.parametrize(
    ("end", "kind", "message", "status"),
    [
        (lambda call: call.fail(ValueError("no")), ValueError, "no", "FAILURE"),
        (lambda call: call.fail(TimeoutError("barrier")), TimeoutError, "barrier", "FAILURE"),
        (lambda call: call.exit(3), SystemExit, "3", "FAILURE"),
        (lambda call: call.crash("exit code 137"), exception.RemoteError, "137", "FAILURE"),
        (lambda call: call.oom(), exception.RemoteError, "memory", "PENDING"),
        (lambda call: call.break_down(), exception.InternalFailure, "scheduler", "PENDING"),
        (lambda call: call.stop(), exception.RemoteError, "", "TERMINATED"),
    ],
    ids=["exception", "timeout-error", "exit", "crash", "oom", "internal", "cancelled"],
)
def test_the_ends_of_a_call_that_runs(lab, end, kind, message, status):
    call, scripted = lab.spawn()
    scripted.start()
    end(scripted)
    with lab.refused(kind, message):
        call.get(timeout=0)
    assert lab.graph(call)[0] == status


def test_what_does_not_run_cannot_end(lab):
    call, scripted = lab.spawn()
    scripted.end(1)
    scripted.oom()
    scripted.preempt()
    assert scripted.status == "pending"
    scripted.start()
    scripted.end(2)
    scripted.start()
    scripted.fail(ValueError())
    assert (call.get(timeout=0), scripted.attempt) == (2, 1)


def test_the_timeout_of_the_function_counts_from_the_start(lab):
    call, scripted = lab.spawn()
    lab.world.advance(1000)
    assert scripted.status == "pending"
    scripted.start()
    lab.world.advance(299)
    assert scripted.status == "running"
    lab.world.advance(1)
    with lab.refused(exception.FunctionTimeoutError, "hit its timeout of 300s"):
        call.get(timeout=0)
    assert lab.graph(call)[0] == "TIMEOUT"
    lab.world.settle()
    assert not scripted.has_container


def test_a_preempted_call_gets_the_same_input_again(lab):
    call, scripted = lab.spawn("input")
    scripted.start()
    first = lab.graph(call)[1]
    scripted.preempt()
    assert scripted.interrupted
    lab.world.settle()
    assert (scripted.status, scripted.has_container) == ("pending", False)
    scripted.start()
    assert scripted.attempt == 2
    assert lab.graph(call)[1] not in ("", first)
    assert scripted.arguments == (("input",), {})
    lab.world.advance(299)  # the timeout is that of one container
    scripted.end("second")
    assert call.get(timeout=0) == "second"


def test_a_result_in_the_grace_of_a_preemption_counts(lab):
    call, scripted = lab.spawn()
    scripted.start()
    scripted.preempt()
    scripted.end("in time")
    lab.world.settle()
    assert (call.get(timeout=0), scripted.attempt) == ("in time", 1)


def test_a_program_that_ignores_its_preemption_is_killed(lab):
    _, scripted = lab.spawn()
    scripted.start()
    scripted.ignore_interrupt()
    scripted.preempt()
    lab.world.advance(29)
    assert scripted.has_container
    lab.world.advance(1)
    assert (scripted.status, scripted.has_container) == ("pending", False)


def test_last_words(lab):
    held = lab.dict()
    _, scripted = lab.spawn()
    held["call"] = 0
    scripted.start()
    scripted.on_interrupt(5, lambda: lab.world.dict("dict").put("end", scripted.call_id))
    scripted.preempt()
    lab.world.advance(4)
    assert not held.contains("end")
    lab.world.advance(1)
    assert held["end"] == scripted.call_id


def test_the_next_container_behaves_as_usual(lab):
    said = []
    _, scripted = lab.spawn()
    scripted.start()
    scripted.on_interrupt(20, lambda: said.append(scripted.attempt))
    scripted.preempt()
    lab.world.advance(20)
    scripted.start()
    scripted.preempt()
    lab.world.advance(1)
    assert (scripted.has_container, said) == (False, [1])


def test_killed_programs_have_no_last_words(lab):
    said = []
    _, scripted = lab.spawn()
    scripted.start()
    scripted.on_interrupt(float("inf"), lambda: said.append(1))
    scripted.preempt()
    lab.world.advance(60)
    assert not scripted.has_container
    assert said == []


def test_a_cancelled_call_is_terminated_at_once_and_its_container_later(lab):
    call, scripted = lab.spawn()
    scripted.start()
    call.cancel(terminate_containers=True)
    assert lab.graph(call)[0] == "TERMINATED"
    assert (scripted.has_container, scripted.interrupted) == (True, True)
    scripted.end("too late")
    with lab.refused(exception.RemoteError):
        call.get(timeout=0)


@pytest.mark.parametrize(("terminate", "gone"), [(True, True), (False, False)])
def test_who_ignores_a_cancel(lab, terminate, gone):
    call, scripted = lab.spawn()
    scripted.start()
    scripted.ignore_interrupt()
    call.cancel(terminate_containers=terminate)
    lab.world.advance(31)
    assert scripted.has_container is not gone
    lab.world.advance(300)  # at the latest, its timeout ends it
    assert not scripted.has_container
    assert scripted.status == "terminated"


def test_cancelling_what_waits_and_what_has_ended(lab):
    call, scripted = lab.spawn()
    call.cancel()
    assert scripted.status == "terminated"
    scripted.start()
    assert scripted.attempt == 0
    other, scripted = lab.spawn()
    scripted.start()
    scripted.end(1)
    other.cancel(terminate_containers=True)
    assert other.get(timeout=0) == 1


def test_outputs_are_kept_for_seven_days(lab):
    call, scripted = lab.spawn()
    scripted.start()
    scripted.end(1)
    lab.world.advance(7 * DAY - 1)
    assert call.get(timeout=0) == 1
    lab.world.advance(1)
    with lab.refused(exception.OutputExpiredError):
        call.get(timeout=0)


def test_retries_of_modal_itself_are_refused(lab):
    with lab.refused(exception.UnimplementedError, "tries no input again"):
        lab.function.with_options(retries=1).spawn()


def test_no_such_call(lab):
    call = modal.FunctionCall.from_id("fc-0", client=lab.client)
    for ask in (lambda: call.get(timeout=0), call.get_call_graph, call.cancel):
        with lab.refused(exception.NotFoundError, "'fc-0' not found"):
            ask()
    with pytest.raises(LookupError, match="there is no call 'fc-0'"):
        lab.world.call("fc-0")
