"""A replica whose container is told to end: if it is run again, and what is written down."""

import os
import signal
import subprocess
import threading
import time

import modal
import pytest
from wrapper_lab import outcome, payload, say_status, texts

from diloco_modal import run_replica
from diloco_modal._client._lives import Life, Record, new_life, was_cancelled
from diloco_modal._state._states import trace_of
from diloco_protocol import Outcome, UnavailableError


@pytest.mark.processes
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_runner_and_goes_on(record, tmp_path):
    def interrupt():
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_replica(payload("wait", folder=str(tmp_path)))
    assert record["end-0-1"]["started"] == 1
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [
        line
        for line in left.splitlines()
        if "diloco_protocol.runner" in line and str(tmp_path) in line
    ]


# --- a container is taken away after its replica has ended, and before the call has returned ---


def interrupted_at(record, monkeypatch, key, *, before=False):
    """Modal's SIGINT comes while an entry is written, or just before it reaches Modal, once."""
    plain, left = record.put, [True]

    def put(asked, value, *, skip_if_exists=False):
        if asked != key or not left:
            return plain(asked, value, skip_if_exists=skip_if_exists)
        left.clear()
        if not before:
            plain(asked, value, skip_if_exists=skip_if_exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "put", put)


@pytest.mark.processes
@pytest.mark.parametrize(("what", "before"), [("rank", True), ("fail", False)])
def test_what_has_ended_is_not_trained_again(record, monkeypatch, what, before):
    told = payload(what)
    interrupted_at(record, monkeypatch, "end-0-1", before=before)
    with pytest.raises(KeyboardInterrupt):
        run_replica(told)
    assert record["end-0-1"]["again"] is False
    entries = dict(record)
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing can be started any more
    first, second = outcome(told), outcome(told)
    assert first == second
    assert (first.result, first.error_type) == (
        (["0", None], None) if what == "rank" else (None, "TimeoutError")
    )
    assert record == entries


@pytest.mark.processes
@pytest.mark.usefixtures("interruptible")
def test_what_succeeds_in_its_grace_is_not_trained_again(record, monkeypatch, tmp_path):
    def interrupt():
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    told = payload("returns when it is told to end", folder=str(tmp_path))
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_replica(told)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert outcome(told).result == "done"


def test_a_container_that_came_too_late_stays_too_late(record, monkeypatch):
    interrupted_at(record, monkeypatch, "end-0-1")
    with pytest.raises(KeyboardInterrupt):
        run_replica(payload(start_in=-1))
    assert "pending_timeout" in outcome(payload(start_in=60)).error


@pytest.mark.parametrize("end", [{}, {"outcome": ""}, {"outcome": "{"}, {"outcome": 7}])
def test_an_end_without_an_outcome_is_followed_by_another_life(record, end):
    record["life-0-1"] = {"attempt": 1, "at": 0.0}
    record["end-0-1"] = {"started": 1, "failed": 0, "at": 1.0, "again": True, **end}
    assert new_life(Record(record), 0, 2.0) == Life(2, {"started": 1, "failed": 0})
    assert record["life-0-2"]["attempt"] == 2


@pytest.mark.parametrize(
    ("status", "again"), [("PENDING", True), ("TERMINATED", False), (None, None)]
)
def test_who_is_interrupted_writes_down_whether_the_call_comes_again(
    record, monkeypatch, status, again
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    say_status(monkeypatch, status or modal.exception.ConnectionError("away"))
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_replica(payload())
    assert record["end-0-1"]["again"] is again


@pytest.mark.processes
@pytest.mark.parametrize(("word", "trained"), [("TERMINATED", False), ("PENDING", True)])
def test_what_was_cancelled_while_its_container_was_made_trains_nothing(
    record, monkeypatch, word, trained
):
    """Of a cancel that was refused the mark may be there for a moment."""
    record["cancel-0"] = {"by": "executor", "at": time.time()}
    say_status(monkeypatch, word)
    done = outcome(payload())
    assert (done.exit_code == 0) is trained
    assert trained or done.error == "it was cancelled before it had begun"
    trace = trace_of(texts(record), 0)
    assert (trace.open, trace.attempt, bool(trace.outcome)) == (False, 1, trained)


def test_whether_a_call_was_cancelled_is_no_reason_to_wait_or_to_fail(record, monkeypatch):
    record["life-0-1"], plain = {"attempt": 1, "at": 1.0, "id": "of another"}, record.get

    def get(key):
        if key == "cancel-0":
            raise UnavailableError("away")
        return plain(key)

    record["end-0-1"] = {
        "started": 1,
        "failed": 0,
        "at": 2.0,
        "outcome": Outcome(0, result=7).to_json(),
    }
    assert outcome(payload()).result == 7
    monkeypatch.setattr(record, "get", get)
    assert not was_cancelled(Record(record), 0)
