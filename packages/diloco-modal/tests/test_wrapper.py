"""The wrapper, with a real runner and a Dict in memory."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import modal
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_modal import ModalOptions, _wrapper, run_replica
from diloco_modal._payload import payloads
from diloco_modal._states import living, trace_of
from diloco_modal._wrapper import (
    Life,
    _cancelled,
    _end,
    _last_word,
    _report,
    _watch,
    kept,
    new_life,
)
from diloco_protocol import Outcome, Reason, UnavailableError, make_request

PATIENCE = 600.0
PROGRAM = """
    import os, pathlib, signal, time

    def train(what, folder=None):
        if what == "attempt":
            return int(os.environ["DILOCO_ATTEMPT"])
        if what == "fail":
            raise TimeoutError("a barrier")
        if what == "again":
            if os.environ["DILOCO_ATTEMPT"] == "1":
                raise ValueError("once")
            while not pathlib.Path(folder, "go").exists():
                time.sleep(0.02)
        if what == "session":
            return os.getsid(os.getppid())
        if what == "returns when it is told to end":
            told = []
            signal.signal(signal.SIGTERM, lambda *_: told.append(True))
            pathlib.Path(folder, "begun").write_text("")
            while not told:
                time.sleep(0.01)
            return "done"
        if what == "wait":
            pathlib.Path(folder, "begun").write_text("")
            time.sleep(600)
        return [os.environ["REPLICA_RANK"], os.environ.get("COLOUR")]
"""


class Record(dict):
    """What the wrapper uses of a ``modal.Dict``."""

    def put(self, key, value, *, skip_if_exists=False):
        if skip_if_exists and key in self:
            return False
        self[key] = value
        return True


@pytest.fixture
def record(monkeypatch, tmp_path):
    held = Record(launch={"id": "one", "at": time.time()})
    monkeypatch.setattr(modal.Dict, "from_name", lambda *_, **__: held)
    monkeypatch.setattr(modal, "current_function_call_id", lambda: "fc-own")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return held


def payload(what="rank", *, start_in=60.0, **options):
    own = {name: options.pop(name) for name in ("pending_timeout",) if name in options}
    kwargs = {"what": what, "folder": options.pop("folder", None)}
    request = make_request(1, "program:train", kwargs, run_id="run", **options)
    chosen = ModalOptions(grace=2.0, **own)
    (told,) = payloads(request, chosen, "one", time.time() + start_in)
    return told


def outcome(told):
    return Outcome.from_json(run_replica(told))


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
    assert new_life(record, 0, 2.0) == Life(1, {"started": 0, "failed": 0})
    assert new_life(record, 1, 2.0) == Life(2, {"started": 1, "failed": 0})
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
    assert done.exit_code == 1
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
    monkeypatch.setattr(_wrapper, "_RECORD_SECONDS", seconds)
    done = outcome(payload(pending_timeout=50, start_in=-50))
    over.set()
    said = "pending_timeout" if key == "end-0-1" else r"did not answer within 0\.2 s"
    assert done.reason is Reason.START_FAILED
    assert re.search(said, done.error)


def test_a_payload_of_another_version():
    done = outcome({"version": 99, "deploy": "modal deploy my_app.py"})
    assert done.reason is Reason.START_FAILED
    assert "version 99" in done.error
    assert "reads version 1" in done.error
    assert "modal deploy my_app.py" in done.error


def test_a_secret_without_the_key(record):
    told = payload(secrets={"NOT_THERE": "tokens"})
    assert "'tokens' has no key NOT_THERE" in outcome(told).error


def test_it_never_raises(record, monkeypatch):
    def unreachable(*_, **__):
        raise TimeoutError("away")

    monkeypatch.setattr(modal.Dict, "from_name", unreachable)
    assert "TimeoutError: away" in outcome(payload()).error


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
    assert new_life(record, 0, 2.0) == Life(2, {"started": 1, "failed": 0})
    assert record["life-0-2"]["attempt"] == 2


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
    assert done.exit_code or "was reported" in again.error


@pytest.mark.parametrize(
    ("status", "again"), [("PENDING", True), ("TERMINATED", False), (None, None)]
)
def test_who_is_interrupted_writes_down_whether_the_call_comes_again(
    record, monkeypatch, status, again
):
    def graph(call_id):
        if status is None:
            raise modal.exception.ConnectionError("away")
        own = SimpleNamespace(
            function_call_id=call_id, status=getattr(modal.types.InputStatus, status)
        )
        other = SimpleNamespace(function_call_id="fc-other", status=modal.types.InputStatus.FAILURE)
        return [other, own]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    call = type(
        "Call", (), {"from_id": lambda it: SimpleNamespace(get_call_graph=lambda: graph(it))}
    )
    monkeypatch.setattr(modal, "FunctionCall", call)
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
    graph = [SimpleNamespace(function_call_id="fc-own", status=SimpleNamespace(name=word))]
    call = SimpleNamespace(get_call_graph=lambda: graph)
    monkeypatch.setattr(modal.FunctionCall, "from_id", lambda _: call)
    done = outcome(payload())
    assert (done.exit_code == 0) is trained
    assert trained or done.error == "it was cancelled before it had begun"
    trace = trace_of(record, 0)
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
    assert not _cancelled(record, 0)


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
    monkeypatch.setattr(_wrapper, "_comes_again", lambda: True)
    seen = []
    for life in range(1, 4):
        with pytest.raises(KeyboardInterrupt):
            run_replica(payload())
        before = {key: value for key, value in record.items() if key != f"end-0-{life}"}
        seen += [living(trace_of(entries, 0), "").attempt for entries in (before, record)]
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
    class Failing(Record):
        left = 1

        def put(self, key, value, *, skip_if_exists=False):
            if self.left:
                self.left -= 1
                raise ConnectionError("away")
            return super().put(key, value, skip_if_exists=skip_if_exists)

    counter, record = tmp_path / "attempts", Failing()
    counter.write_text('{"started": 3, "failed": 2}')
    before = {"started": 1, "failed": 1}
    assert _watch(FakeRunner(looks=1), counter, before, record, 5) == 3
    assert not record
    assert _watch(FakeRunner(looks=1), counter, before, record, 5) == 3
    assert list(record) == ["attempt-5-3"]
    assert _watch(FakeRunner(looks=1), counter, {"started": 0, "failed": 0}, record, 6) == 3
    assert list(record) == ["attempt-5-3", "attempt-6-2", "attempt-6-3"]


@pytest.mark.parametrize(("code", "status"), [(-9, 137), (0, 1), (3, 3), (-200, 255)])
@pytest.mark.parametrize("text", [None, b"{", b"\xff"])
def test_a_runner_that_leaves_no_report(tmp_path, code, status, text):
    path = tmp_path / "outcome"
    if text is not None:
        path.write_bytes(text)
    told = Outcome.from_json(_report(path, code))
    assert (told.exit_code, told.reason) == (status, Reason.ERROR)
    assert f"the runner ended with {code} and left no report" in told.error
