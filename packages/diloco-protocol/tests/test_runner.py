"""The runner, with real processes: it tells the truth about every end, and leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_protocol import Outcome, Reason, ReplicaSpec, spec_to_arguments, spec_to_environment
from diloco_protocol._processes import members, processes

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

def leaves_politely(mark):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    open(mark, "w").write(str(os.getpid()))
    time.sleep(600)

def fails_and_leaves_a_child(mark):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    open(mark, "w").write(str(child.pid))
    raise ValueError("by itself")

def orphans_a_process(mark):
    subprocess.run(["sh", "-c", "true & exec true"], check=True)
    open(mark + ".new", "w").write(f"the parent is {os.getppid()}")
    os.rename(mark + ".new", mark)
    time.sleep(600)

def waits_for_a_word(mark):
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("SIGUSR1"))
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(mark, "w").write(str(os.getpid()))
    while not heard:
        time.sleep(0.01)
    alive = helper.poll() is None
    helper.kill()
    helper.wait()
    return [*heard, alive]

def moves(folder):
    os.chdir(folder)
    return os.getcwd()

def sees():
    return {name: value for name, value in os.environ.items() if name.startswith(("DILOCO_", "RENDEZVOUS"))}

def imported():
    return sorted(sys.modules)

def in_a_pool():
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(abs, -3).result()

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

    def start(
        function, /, *, timeout=None, grace=0.3, rank=0, through="file", entry=None, around=(), wrapper=(), **kwargs
    ):
        spec = ReplicaSpec(
            entry or f"entry:{function}", kwargs, rank, 4, 2, "a-run", "/tmp/somewhere", "MY_RANK", timeout, grace
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
        environment.update(around)
        command = [*wrapper, sys.executable, "-m", "diloco_protocol.runner"]
        command += ["--outcome", str(tmp_path / "outcome.json")]
        if through == "file":
            (tmp_path / "spec.json").write_text(spec.to_json())
            command += ["--spec", str(tmp_path / "spec.json")]
        elif through == "arguments":
            command += spec_to_arguments(spec)
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


def overrun(replica, tmp_path, function, **arguments):
    """The outcome of a replica that was ready for signals (it leaves its mark) before its timeout passed."""
    for timeout in (0.7, 3.0, 20.0):
        outcome = end(replica(function, timeout=timeout, mark=str(tmp_path / "pid"), **arguments), tmp_path)
        if (tmp_path / "pid").exists():
            return outcome
    raise AssertionError("this machine takes longer than 20 s to start a program")


def children(parent, besides):
    """Living processes below another, but for one of them."""
    return [process.pid for process in members(parent, -1) if process.pid != besides]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestOutcomes:
    @pytest.mark.parametrize("through", ["file", "environment", "arguments"])
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

    @pytest.mark.parametrize("through", ["file", "environment"])
    def test_nothing_of_a_run_around_it_shines_through(self, replica, tmp_path, through):
        around = (
            {"RENDEZVOUS_URI": "/other", "DILOCO_RUN_ID": "other", "DILOCO_SPEC_7": "x"} if through == "file" else {}
        )
        seen = end(replica("sees", through=through, around=around), tmp_path).result
        assert seen == {"RENDEZVOUS_URI": "/tmp/somewhere", "DILOCO_RUN_ID": "a-run", "DILOCO_ATTEMPT": "2"}

    def test_a_replica_is_as_light_as_its_entrypoint(self, replica, tmp_path):
        heavy = {"torch", "numpy", "asyncio", "multiprocessing", "importlib.metadata", "logging", "ctypes", "argparse"}
        assert not heavy & set(end(replica("imported"), tmp_path).result)

    def test_it_may_change_its_folder(self, tmp_path):
        (tmp_path / "entry.py").write_text(MODULE)
        (tmp_path / "spec.json").write_text(ReplicaSpec("entry:moves", {"folder": "/"}, 0, 1).to_json())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
        command = [sys.executable, "-m", "diloco_protocol.runner", "--spec", "spec.json", "--outcome", "outcome.json"]
        subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=True)
        assert Outcome.from_json((tmp_path / "outcome.json").read_text()).result == "/"
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
            "entry.py",
            "outcome.json",
            "spec.json",
        ]

    def test_it_may_start_processes_of_its_own(self, replica, tmp_path):
        assert end(replica("in_a_pool"), tmp_path).result == 3

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
        outcome = overrun(replica, tmp_path, "sleeps", stubborn=True)
        assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, "SIGKILL")

    def test_an_orderly_end_after_the_timeout_is_no_success(self, replica, tmp_path):
        outcome = overrun(replica, tmp_path, "leaves_politely", grace=20.0)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (124, None, Reason.TIMEOUT)
        assert "longer than its timeout" in outcome.error

    def test_the_longest_timeout(self, replica, tmp_path):
        assert end(replica("returns", timeout=1e300), tmp_path).exit_code == 0

    def test_a_failure_of_its_own_stays_one_while_its_children_are_ended(self, replica, tmp_path):
        runner = replica("fails_and_leaves_a_child", grace=1.0, mark=str(tmp_path / "pid"))
        pid = read_pid(tmp_path / "pid")
        # Its child ignores SIGTERM, so from here the runner waits for the grace to pass.
        wait_for(lambda: "ValueError: by itself" in runner.stderr.readline(), "its traceback")
        wait_for(lambda: not children(runner.pid, besides=pid), "the replica itself to end")
        runner.terminate()
        outcome = end(runner, tmp_path)
        assert (outcome.reason, outcome.error) == (Reason.ERROR, "ValueError: by itself")
        assert not alive(pid)

    def test_a_word_to_the_program_is_passed_on_and_ends_nothing(self, replica, tmp_path):
        runner = replica("waits_for_a_word", mark=str(tmp_path / "pid"))
        read_pid(tmp_path / "pid")
        runner.send_signal(signal.SIGUSR1)
        assert end(runner, tmp_path).result == ["SIGUSR1", True]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
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


# With a /proc of its own, as a container has; nothing inside outlives unshare itself.
NAMESPACE = ("--pid", "--fork", "--mount-proc", "--kill-child")


def namespaces():
    """Whether a test may make a PID namespace, as a container is."""
    if not (unshare := shutil.which("unshare")):
        return False
    return subprocess.run([unshare, *NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces(), reason="no PID namespaces may be made here")
class TestAsPid1:
    def test_it_heeds_sigterm_and_reaps_orphans(self, replica, tmp_path):
        mark = tmp_path / "pid"
        unshare = replica("orphans_a_process", mark=str(mark), wrapper=["unshare", *NAMESPACE])
        wait_for(mark.exists, "the replica")
        assert mark.read_text() == "the parent is 1"
        (runner,) = [process for process in processes() if process.parent == unshare.pid]
        (child,) = wait_for(
            lambda: (found := [process for process in processes() if process.parent == runner.pid]) and found, "it"
        )
        zombies = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
        wait_for(lambda: zombies.read_text().split() == [str(child.pid)], "the orphan to be reaped")
        os.kill(runner.pid, signal.SIGTERM)
        outcome = end(unshare, tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (143, "SIGTERM", Reason.CANCEL_REQUESTED)


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

    @pytest.mark.parametrize("where", ["none/outcome.json", "file/outcome.json"])
    def test_nothing_is_started_whose_outcome_could_not_be_written(self, tmp_path, where):
        (tmp_path / "file").touch()
        (tmp_path / "entry.py").write_text(f"def f(): open({str(tmp_path / 'started')!r}, 'w').close()\n")
        (tmp_path / "spec.json").write_text(ReplicaSpec("entry:f", {}, 0, 1).to_json())
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        done = self.run("--spec", str(tmp_path / "spec.json"), "--outcome", str(tmp_path / where), PYTHONPATH=path)
        assert done.returncode == 2
        assert "the outcome cannot be written" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "started").exists()

    def test_an_incomplete_spec_in_the_arguments(self):
        pieces = spec_to_arguments(ReplicaSpec("m:f", {"a": "x" * 1000}, 0, 1))
        done = self.run(*pieces[1:])
        assert done.returncode == 2
        assert "incomplete replica spec" in done.stderr

    def test_no_such_file(self, tmp_path):
        done = self.run("--spec", str(tmp_path / "none.json"))
        assert done.returncode == 2
        assert "none.json" in done.stderr
