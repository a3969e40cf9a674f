"""The wrapper, with a real runner and a Dict in memory."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import modal
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wrapper_lab import PATIENCE, Held, get_entry, outcome, payload, texts

from diloco_modal import _wrapper, run_replica
from diloco_modal._client import _lives, _wire
from diloco_modal._client._lives import Life, Record, new_life
from diloco_modal._state._states import living, trace_of
from diloco_modal._wrapper import (
    _end,
    _last_word,
    _report,
    _watch,
    kept,
)
from diloco_protocol import Outcome, Reason


@pytest.mark.processes
def test_a_replica_is_run_and_written_down(record):
    done = outcome(payload(env={"COLOUR": "red"}))
    assert (done.exit_code, done.result, done.reason) == (0, ["0", "red"], Reason.COMPLETED)
    assert record["call-0"] == {"call": "fc-own"}
    assert record["life-0-1"]["attempt"] == 1
    end = record["end-0-1"]
    assert (end["started"], end["failed"], end["again"]) == (1, 0, False)


@pytest.mark.processes
def test_restarts_and_lives_are_counted_as_attempts(record):
    done = outcome(payload("fail", max_restarts=1))
    assert (done.exit_code, done.error_type, done.attempt) == (1, "TimeoutError", 2)
    assert (record["end-0-1"]["started"], record["end-0-1"]["failed"]) == (2, 2)
    record["end-0-1"]["outcome"] = ""  # as if it had been interrupted
    assert outcome(payload("attempt")).result == 3
    assert record["life-0-2"]["attempt"] == 3


def test_a_lost_answer_begins_no_other_life(record, monkeypatch):
    """Modal's client asks again, and hears that the entry is there."""
    plain = record.put

    def put(key, value, *, skip_if_exists=False):
        plain(key, value, skip_if_exists=skip_if_exists)
        return False

    record["life-1-1"] = {"attempt": 1, "at": 0.0}
    monkeypatch.setattr(record, "put", put)
    assert new_life(Record(record), 0, 2.0) == Life(1, {"started": 0, "failed": 0})
    assert new_life(Record(record), 1, 2.0) == Life(2, {"started": 1, "failed": 0})
    assert record.keys() == {"launch", "life-0-1", "life-1-1", "life-1-2"}


@pytest.mark.processes
def test_a_life_without_an_end_was_an_attempt(record):
    record["call-0"] = {"call": "fc-own"}
    record["life-0-1"] = {"attempt": 1, "at": 0.0}
    assert outcome(payload("attempt")).result == 2


@pytest.mark.processes
def test_a_life_that_was_killed_had_its_restarts_too(record):
    record["life-0-1"] = {"attempt": 1, "at": 0.0}
    record["attempt-0-2"] = {"at": 1.0}
    record["attempt-0-3"] = {"at": 2.0}
    outcome = Outcome.from_json(run_replica(payload("attempt", max_restarts=2)))
    assert (outcome.result, record["life-0-2"]["attempt"]) == (4, 4)
    assert record["end-0-2"]["failed"] == 2


def test_a_restart_is_in_the_record_while_it_runs(record, tmp_path):
    made = payload("again", folder=str(tmp_path), max_restarts=1)
    thread = threading.Thread(target=run_replica, args=(made,))
    thread.start()
    try:
        limit = time.monotonic() + PATIENCE
        while "attempt-0-2" not in record:
            assert time.monotonic() < limit, record
            time.sleep(0.02)
        assert "end-0-1" not in record
    finally:
        (tmp_path / "go").touch()
        thread.join()
    assert record["end-0-1"]["started"] == 2


def test_a_result_that_is_too_large(record):
    done = outcome({**payload(), "result_bytes": 3})
    assert done.exit_code == 79
    assert "3" in done.error


def test_another_call_holds_the_rank(record):
    record["call-0"] = {"call": "fc-other"}
    done = outcome(payload())
    assert (done.reason, done.exit_code) == (Reason.START_FAILED, 2)
    assert "another call holds rank 0" in done.error
    assert "life-0-1" not in record


def test_the_launch_is_gone(record):
    record["launch"] = {"id": "two", "at": time.time()}
    assert "left over from a launch that is gone" in outcome(payload()).error
    assert "call-0" not in record
    del record["launch"]  # its record has faded or was removed, and the Dict is there again
    assert "left over from a launch that is gone" in outcome(payload()).error
    assert "call-0" not in record


def test_a_container_that_comes_too_late(record):
    late = outcome(payload(pending_timeout=50, start_in=-50))
    assert "it got its container 100 s after it was asked for, and pending_timeout=50" in late.error


@pytest.mark.processes
def test_another_container_of_what_came_in_time_is_never_too_late(record):
    record["life-0-1"] = {"attempt": 1, "at": time.time() - 90}
    assert outcome(payload("attempt", pending_timeout=50, start_in=-50)).result == 2


@pytest.mark.parametrize("key", ["launch", "call-0", "life-0-1", "end-0-1"])
def test_modal_never_answers_about_the_record(record, monkeypatch, key):
    """A container that waits costs money, and one that does not return loses its result."""
    over, plain = threading.Event(), {"get": record.get, "put": record.put}

    def hanging(name):
        def call(asked, *rest, **more):
            if asked == key:
                over.wait()
            return plain[name](asked, *rest, **more)

        return call

    for name in plain:
        monkeypatch.setattr(record, name, hanging(name))
    seconds = 3.0 if key == "end-0-1" else 0.2  # where all else has to be in time
    monkeypatch.setattr(_lives, "_RECORD_SECONDS", seconds)
    done = outcome(payload(pending_timeout=50, start_in=-50))
    over.set()
    said = "pending_timeout" if key == "end-0-1" else r"did not answer within 0\.2 s"
    assert done.reason is Reason.START_FAILED
    assert re.search(said, done.error)


def test_a_payload_of_another_version():
    done = outcome({"version": 99, "deploy": "modal deploy my_app.py"})
    assert done.reason is Reason.START_FAILED
    assert "version 99" in done.error
    assert "reads version 2" in done.error
    assert "modal deploy my_app.py" in done.error


def test_a_secret_without_the_key(record):
    told = payload(secrets={"NOT_THERE": "tokens"})
    assert "'tokens' has no key NOT_THERE" in outcome(told).error


def test_it_never_raises(record, monkeypatch):
    def unreachable(*_, **__):
        raise TimeoutError("away")

    monkeypatch.setattr(modal.Dict, "from_name", unreachable)
    assert "TimeoutError: away" in outcome(payload()).error


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("text", [None, b"{", b"\xff", Outcome(0), Outcome(143)])
def test_the_last_word_of_a_replica(tmp_path, over, text):
    """What failed after it was told to end has to run again; what had failed before has not."""
    path = tmp_path / "outcome"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.to_json().encode())
    final = isinstance(text, Outcome) and (over or text.exit_code == 0)
    assert _last_word(path, over=over) == (text.to_json() if final else "")


@given(
    st.builds(
        Outcome,
        st.integers(0, 255),
        error=st.none() | st.text() | st.just("\0" * 5000),
        traceback=st.none() | st.sampled_from(["", "é" * 5000]),
        result=st.none() | st.text() | st.sampled_from(["x" * 3000, "é" * 9000]),
        attempt=st.integers(1, 9),
    )
)
def test_the_record_keeps_how_it_ended_and_small_results(done):
    text = done.to_json()
    held = kept(text)
    assert len(held) < 7000
    if len(text) <= 4000:
        assert held == text
        return
    again = Outcome.from_json(held)
    assert (again.exit_code, again.reason, again.attempt) == (
        done.exit_code,
        done.reason,
        done.attempt,
    )
    assert again.result is None
    assert done.exit_code or "too long for the record" in again.error


@pytest.mark.parametrize("key", ["life-0-1", "end-0-1", "call-0"])
def test_a_damaged_entry_is_named(record, key):
    record["life-0-1"] = {"attempt": 1, "at": 1.0}
    record[key] = {"of": "somebody else"}
    done = outcome(payload())
    assert done.reason is Reason.START_FAILED
    assert f"DamagedRecordError: the entry '{key}' of the run's record" in done.error
    record["launch"] = "damaged"
    assert "left over from a launch that is gone" in outcome(payload()).error


def test_modal_is_not_imported_before_it_is_needed():
    code = "import sys, diloco_modal; print('modal' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_life_that_ends_before_its_runner_has_an_end(record, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "Popen", fail)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run_replica(payload())
    else:
        assert outcome(payload()).reason is Reason.START_FAILED
    assert "life-0-1" in record
    assert record["end-0-1"]["again"] is (None if error is KeyboardInterrupt else False)
    # The attempt that was told to be running is not told to begin anew.
    assert record["end-0-1"]["started"] == record["life-0-1"]["attempt"] == 1


def test_who_looks_never_sees_attempts_go_back(record, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    monkeypatch.setattr(_wrapper, "comes_again", lambda: True)
    seen = []
    for life in range(1, 4):
        with pytest.raises(KeyboardInterrupt):
            run_replica(payload())
        before = {key: value for key, value in record.items() if key != f"end-0-{life}"}
        seen += [living(trace_of(texts(entries), 0), "").attempt for entries in (before, record)]
    assert seen == [1, 2, 2, 3, 3, 4]


@pytest.mark.processes
def test_the_runner_does_not_get_the_signals_of_the_container(record):
    assert outcome(payload("session")).result != os.getsid(0)


class FakeRunner:
    """Ends when it is told to, or, if it is stubborn, when it is killed."""

    def __init__(self, *, looks=0, stubborn=False):
        self.looks, self.stubborn, self.told = looks, stubborn, []

    def wait(self, seconds=None):
        if seconds is not None:
            self.told.append(seconds)
        self.looks -= 1
        if self.looks >= 0 or (self.stubborn and "kill" not in self.told):
            raise subprocess.TimeoutExpired("runner", seconds)
        return 3

    def send_signal(self, number):
        self.told.append(number)

    def kill(self):
        self.told.append("kill")


def test_a_runner_that_is_ended_has_its_grace():
    runner, stubborn = FakeRunner(), FakeRunner(stubborn=True)
    _end(runner, 7.0)
    _end(stubborn, 7.0)
    assert runner.told == [signal.SIGTERM, 9.0]
    assert stubborn.told == [signal.SIGTERM, 9.0, "kill"]


def test_all_attempts_since_the_last_look_are_written_down_also_if_that_fails_once(tmp_path):
    class Failing(Held):
        left = 1

        def put(self, key, value, *, skip_if_exists=False):
            if self.left:
                self.left -= 1
                raise ConnectionError("away")
            return super().put(key, value, skip_if_exists=skip_if_exists)

    counter, record = tmp_path / "attempts", Failing()
    counter.write_text('{"started": 3, "failed": 2}')
    before = {"started": 1, "failed": 1}
    assert _watch(FakeRunner(looks=1), counter, before, Record(record), 5) == 3
    assert not record
    assert _watch(FakeRunner(looks=1), counter, before, Record(record), 5) == 3
    assert list(record) == ["attempt-5-3"]
    assert _watch(FakeRunner(looks=1), counter, {"started": 0, "failed": 0}, Record(record), 6) == 3
    assert list(record) == ["attempt-5-3", "attempt-6-2", "attempt-6-3"]


def test_a_count_that_no_runner_has_is_not_written_down(tmp_path):
    counter, record = tmp_path / "attempts", Held()
    counter.write_text(f'{{"started": {2**29}, "failed": 0}}')
    before = {"started": 0, "failed": 0}
    assert _watch(FakeRunner(looks=1), counter, before, Record(record), 5) == 3
    assert not record


@pytest.mark.parametrize("kind", ["life", "attempt"])
def test_a_record_of_endless_lives_keeps_no_container_busy(record, monkeypatch, kind):
    """Anybody in the environment may have written them."""
    asked = []

    def get(held, key):
        asked.append(key)
        assert len(asked) < 10_000
        return get_entry(held, key) or ('{"at": 1.0}' if key.startswith("attempt") else None)

    monkeypatch.setattr(_wire, "get_entry", get if kind == "attempt" else get_entry)
    value = {"attempt": 1, "at": 0.0}
    record |= {f"life-0-{n}": value for n in range(1, 2 if kind == "attempt" else 20_000)}
    told = outcome(payload())
    assert told.reason is Reason.START_FAILED
    assert "more than 2000 lives and attempts of rank 0" in told.error


@pytest.mark.parametrize(("code", "status"), [(-9, 137), (0, 1), (3, 3), (-200, 255)])
@pytest.mark.parametrize("text", [None, b"{", b"\xff"])
def test_a_runner_that_leaves_no_report(tmp_path, code, status, text):
    path = tmp_path / "outcome"
    if text is not None:
        path.write_bytes(text)
    told = Outcome.from_json(_report(path, code))
    assert (told.exit_code, told.reason) == (status, Reason.ERROR)
    assert f"the runner ended with {code} and left no report" in told.error
