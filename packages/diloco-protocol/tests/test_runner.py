"""The runner, with real processes: it tells the truth about every end, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from diloco_protocol import Outcome, Reason, ReplicaSpec, spec_to_environment

MODULE = """
import os, signal, subprocess, sys, time

def returns(**kwargs):
    return kwargs

def environment():
    names = ("REPLICA_RANK", "WORLD_SIZE", "RENDEZVOUS_URI", "DILOCO_RUN_ID", "DILOCO_ATTEMPT", "MY_RANK")
    return {name: os.environ.get(name) for name in names}

def large(megabytes):
    return "x" * (megabytes * 10**6)

def not_json():
    return {"model": [1, object()]}

def raises():
    raise ValueError("no such data")

def leaves(code):
    raise SystemExit(code)

def drops(code):
    os._exit(code)

def crashes(number):
    os.kill(os.getpid(), number)
    time.sleep(60)

def sleeps(mark, stubborn=False, finish=False):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if finish:
        signal.signal(signal.SIGTERM, lambda *_: None)
    open(mark, "w").write(str(os.getpid()))
    if finish:
        signal.pause()
        return "finished all the same"
    time.sleep(600)

def has_children(mark, own_session, wait):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=own_session, stdout=subprocess.PIPE)
    child.stdout.readline()
    open(mark, "w").write(str(child.pid))
    if wait:
        time.sleep(600)
    return "done"

class Space:
    @staticmethod
    def inner():
        return "inner"
"""


@pytest.fixture
def replica(tmp_path):
    """Starts a runner; whatever a failed test leaves is ended by process group."""
    (tmp_path / "entry.py").write_text(MODULE)
    started = []

    def start(function, /, *, timeout=None, grace=0.3, rank=0, through="file", entry=None, **kwargs):
        spec = ReplicaSpec(
            entry or f"entry:{function}", kwargs, rank, 4, 2, "a-run", "/tmp/somewhere", "MY_RANK", timeout, grace
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
        command = [sys.executable, "-m", "diloco_protocol.runner", "--outcome", str(tmp_path / "outcome.json")]
        if through == "file":
            (tmp_path / "spec.json").write_text(spec.to_json())
            command += ["--spec", str(tmp_path / "spec.json")]
        else:
            environment.update(spec_to_environment(spec))
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield start
    for runner in started:
        runner.terminate()
        runner.communicate(timeout=30)


def end(runner, tmp_path, timeout=60):
    """Wait for a runner; its exit code and the outcome it wrote."""
    runner.out, runner.err = runner.communicate(timeout=timeout)
    outcome = Outcome.from_json((tmp_path / "outcome.json").read_text())
    assert runner.returncode == outcome.exit_code
    return outcome


def wait_for(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)
    return found


def read_pid(mark):
    return wait_for(lambda: mark.exists() and mark.read_text(), f"{mark} to be written") and int(mark.read_text())


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestOutcomes:
    @pytest.mark.parametrize("through", ["file", "environment"])
    def test_kwargs_and_result_arrive_exactly(self, replica, tmp_path, through):
        kwargs = {"a": [1, 1.0, True, None, {"b": "$(X) é\n'\""}], "none": None}
        outcome = end(replica("returns", through=through, **kwargs), tmp_path)
        assert (outcome.exit_code, outcome.reason, outcome.error) == (0, Reason.COMPLETED, None)
        assert json.dumps(outcome.result) == json.dumps(kwargs)
        assert outcome.started_at <= outcome.finished_at

    def test_the_replica_knows_who_it_is(self, replica, tmp_path):
        assert end(replica("environment", rank=3), tmp_path).result == {
            "REPLICA_RANK": "3",
            "WORLD_SIZE": "4",
            "RENDEZVOUS_URI": "/tmp/somewhere",
            "DILOCO_RUN_ID": "a-run",
            "DILOCO_ATTEMPT": "2",
            "MY_RANK": "3",
        }

    def test_a_large_result(self, replica, tmp_path):
        assert len(end(replica("large", megabytes=20), tmp_path).result) == 20 * 10**6

    def test_a_dotted_name(self, replica, tmp_path):
        assert end(replica("Space.inner"), tmp_path).result == "inner"

    def test_a_result_that_is_not_json_is_a_failure_that_says_so(self, replica, tmp_path):
        outcome = end(replica("not_json"), tmp_path)
        assert outcome.exit_code == 1
        assert "result.model[1] is a builtins.object" in outcome.error

    def test_an_exception(self, replica, tmp_path):
        runner = replica("raises")
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.reason, outcome.error_type) == (1, Reason.ERROR, "ValueError")
        assert outcome.error == "ValueError: no such data"
        assert 'raise ValueError("no such data")' in outcome.traceback
        assert "no such data" in runner.err

    @pytest.mark.parametrize(
        ("code", "exit_code", "error"),
        [
            (None, 0, None),
            (0, 0, None),
            (3, 3, "code 3"),
            (-1, 255, "code 255"),
            (256, 0, None),
            ("gave up", 1, "gave up"),
        ],
    )
    def test_exits(self, replica, tmp_path, code, exit_code, error):
        outcome = end(replica("leaves", code=code), tmp_path)
        assert outcome.exit_code == exit_code
        assert (outcome.reason is Reason.COMPLETED) == (exit_code == 0)
        assert error is None or error in outcome.error

    @pytest.mark.parametrize("code", [0, 3])
    def test_exits_without_a_word(self, replica, tmp_path, code):
        outcome = end(replica("drops", code=code), tmp_path)
        assert (outcome.exit_code, outcome.result) == (code, None)
        assert code == 0 or "exited with code 3" in outcome.error

    @pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGTERM"])
    def test_signals_are_named(self, replica, tmp_path, name):
        number = getattr(signal, name)
        outcome = end(replica("crashes", number=int(number)), tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (128 + number, name, Reason.ERROR)
        assert name in outcome.error

    @pytest.mark.parametrize(
        ("entry", "told"),
        [
            ("no_such_module:f", "importing module 'no_such_module' failed: ModuleNotFoundError"),
            ("entry:no_such_function", "looking up 'no_such_function' in module 'entry' failed"),
        ],
    )
    def test_what_cannot_be_found_is_named(self, replica, tmp_path, entry, told):
        outcome = end(replica("", entry=entry), tmp_path)
        assert outcome.reason is Reason.START_FAILED
        assert told in outcome.error


class TestEnds:
    def test_a_timeout(self, replica, tmp_path):
        outcome = end(replica("sleeps", timeout=0.5, mark=str(tmp_path / "pid")), tmp_path)
        assert outcome.reason is Reason.TIMEOUT
        assert outcome.signal == "SIGTERM"
        assert "longer than its timeout of 0.5 s" in outcome.error

    def test_a_stubborn_replica_is_killed_after_the_grace(self, replica, tmp_path):
        outcome = end(replica("sleeps", timeout=1.0, mark=str(tmp_path / "pid"), stubborn=True), tmp_path)
        assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, "SIGKILL")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_to_the_runner_reaches_the_replica(self, replica, tmp_path, number):
        runner = replica("sleeps", mark=str(tmp_path / "pid"))
        pid = read_pid(tmp_path / "pid")
        runner.send_signal(number)
        outcome = end(runner, tmp_path)
        assert outcome.reason is Reason.CANCEL_REQUESTED
        assert outcome.exit_code != 0
        assert not alive(pid)

    def test_a_stubborn_replica_is_killed_after_a_signal_too(self, replica, tmp_path):
        runner = replica("sleeps", mark=str(tmp_path / "pid"), stubborn=True)
        pid = read_pid(tmp_path / "pid")
        runner.terminate()
        assert end(runner, tmp_path).signal == "SIGKILL"
        assert not alive(pid)

    def test_a_success_that_wins_the_race_stays_one(self, replica, tmp_path):
        runner = replica("sleeps", mark=str(tmp_path / "pid"), finish=True, grace=20.0)
        read_pid(tmp_path / "pid")
        runner.terminate()
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.reason) == (0, Reason.COMPLETED)
        assert outcome.result == "finished all the same"

    def test_a_kill_from_outside_is_told(self, replica, tmp_path):
        runner = replica("sleeps", mark=str(tmp_path / "pid"))
        os.kill(read_pid(tmp_path / "pid"), signal.SIGKILL)
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (137, "SIGKILL", Reason.ERROR)

    @pytest.mark.parametrize("wait", [True, False], ids=["cancelled", "finished"])
    @pytest.mark.parametrize("own_session", [True, False], ids=["own session", "same group"])
    def test_grandchildren_are_ended(self, replica, tmp_path, own_session, wait):
        runner = replica("has_children", mark=str(tmp_path / "pid"), own_session=own_session, wait=wait)
        pid = read_pid(tmp_path / "pid")
        if wait:
            runner.terminate()
        outcome = end(runner, tmp_path)
        assert (outcome.result == "done") == (not wait)
        assert not alive(pid)


class TestWrongSpecs:
    def run(self, *arguments, **variables):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
        command = [sys.executable, "-m", "diloco_protocol.runner", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def test_another_version_is_refused_by_name(self, tmp_path):
        later = ReplicaSpec("m:f", {}, 0, 1).to_json().replace('"version":1', '"version":7')
        (tmp_path / "spec.json").write_text(later)
        done = self.run("--spec", str(tmp_path / "spec.json"), "--outcome", str(tmp_path / "outcome.json"))
        assert done.returncode == 2
        assert "version 7" in done.stderr
        outcome = Outcome.from_json((tmp_path / "outcome.json").read_text())
        assert (outcome.reason, outcome.error_type) == (Reason.START_FAILED, "SpecVersionError")

    def test_no_spec(self):
        done = self.run()
        assert done.returncode == 2
        assert "no replica spec in the environment" in done.stderr
        assert "Traceback" not in done.stderr

    def test_no_such_file(self, tmp_path):
        done = self.run("--spec", str(tmp_path / "none.json"))
        assert done.returncode == 2
        assert "none.json" in done.stderr
