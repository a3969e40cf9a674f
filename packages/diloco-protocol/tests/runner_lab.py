"""What the tests of the runner share: a module of entrypoints, runners, and how they end."""

import os
import subprocess
import sys
import time

import pytest

from diloco_protocol import Outcome, ReplicaSpec, spec_to_arguments, spec_to_environment
from diloco_protocol._processes import members

#: Seconds after which a test that waits for something real fails instead of hanging. Nothing passes
#: sooner or later because of it, so it is long enough for any load of the machine.
PATIENCE = 600.0

MODULE = """
import os, signal, subprocess, sys, time

from diloco_protocol import DilocoError

def returns(**kwargs):
    return kwargs

def environment():
    names = ("REPLICA_RANK", "REPLICA_WORLD_SIZE", "RENDEZVOUS_URI", "DILOCO_RUN_ID",
             "DILOCO_ATTEMPT", "MY_RANK", "WORLD_SIZE")
    return {name: os.environ.get(name) for name in names}

def large(megabytes):
    return "x" * (megabytes * 10**6)

def not_json():
    return {"model": [1, object()]}

def raises():
    raise ValueError("no such data")

def calls():
    __tracebackhide__ = True
    stays()

def stays():
    hides()

def hides():
    __tracebackhide__ = True
    raises()

def is_replaced():
    class Fenced(DilocoError):
        final = True
    raise Fenced("another process has the rank")

def raises_half_a_pair():
    raise ValueError(os.fsdecode(b"no file data-\\xe9"))

def forges_its_report(text):
    open(sys.orig_argv[-1], "w").write(text)
    os._exit(0)

def leaves(code):
    raise SystemExit(code)

class Unshowable(Exception):
    def __str__(self):
        raise RuntimeError("no text of this")

def without_streams(streams, how):
    if streams == "closed":
        sys.stdout.close()
        sys.stderr.close()
    else:
        sys.stdout = sys.stderr = None
    if how == "exit":
        sys.exit("why")
    if how == "result":
        return object()
    raise Unshowable if how == "unshowable" else ValueError("why")

def sets_limits():
    sys.set_int_max_str_digits(640)
    sys.setrecursionlimit(40)
    return [10**2000, [[[[[[[[[[[[]]]]]]]]]]]]]

def drops(code):
    os._exit(code)

def crashes(number):
    os.kill(os.getpid(), number)
    time.sleep(600)

def sleeps(mark, stubborn=False, finish=False):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heard = []
    if finish:
        signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    open(mark, "w").write(str(os.getpid()))
    if finish:
        while not heard:  # signal.pause() would miss one that comes before it
            time.sleep(0.01)
        return "finished all the same"
    time.sleep(600)

def has_children(mark, own_session, wait):
    code = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print(1, flush=True); time.sleep(600)")
    child = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=own_session, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    open(mark, "w").write(str(child.pid))
    if wait:
        time.sleep(600)
    return "done"

def returns_when_the_disk_is_full():
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return "this"

def leaves_politely(mark, how="sys.exit"):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0) if how == "sys.exit" else os._exit(0))
    open(mark + ".new", "w").write(str(os.getpid()))
    # Only now, when no file is left to be closed: errors of a handler in a destructor are ignored.
    os.rename(mark + ".new", mark)
    time.sleep(600)

def fails_and_leaves_a_child(mark):
    code = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print(1, flush=True); time.sleep(600)")
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
    return {name: value for name, value in os.environ.items()
            if name.startswith(("DILOCO_", "RENDEZVOUS"))}

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
        function,
        /,
        *,
        timeout=None,
        grace=0.3,
        rank=0,
        through="file",
        entry=None,
        around=(),
        wrapper=(),
        world_size_env="REPLICA_WORLD_SIZE",
        **kwargs,
    ):
        spec = ReplicaSpec(
            entry or f"entry:{function}",
            kwargs,
            rank,
            4,
            attempt=2,
            run_id="a-run",
            rendezvous_uri="/tmp/somewhere",
            rank_env="MY_RANK",
            world_size_env=world_size_env,
            timeout=timeout,
            grace=grace,
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        }
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
        started.append(begin(command, environment, tmp_path))
        return started[-1]

    yield start
    for runner in started:
        stop(runner)


def begin(command, environment, folder):
    """A program whose output is kept until it has ended."""
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop(runner):
    runner.terminate()
    runner.communicate(timeout=PATIENCE)


def end(runner, tmp_path):
    """Wait for a runner; its exit code and the outcome it wrote."""
    runner.out, runner.err = runner.communicate(timeout=PATIENCE)
    outcome = Outcome.from_json((tmp_path / "outcome.json").read_text())
    assert runner.returncode == outcome.exit_code
    return outcome


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.01)
    return found


def read_pid(mark):
    return wait_for(lambda: mark.exists() and mark.read_text(), f"{mark} to be written") and int(
        mark.read_text()
    )


def overrun(replica, tmp_path, function, **arguments):
    """The outcome of a replica that was ready for signals (its mark is there) before a timeout."""
    for timeout in (0.7, 3.0, 20.0, 200.0):
        outcome = end(
            replica(function, timeout=timeout, mark=str(tmp_path / "pid"), **arguments), tmp_path
        )
        if (tmp_path / "pid").exists():
            return outcome
    raise AssertionError("this machine takes longer than 200 s to start a program")


def children(parent, besides):
    """Living processes below another, but for one of them."""
    return [process.pid for process in members(parent, -1) if process.pid != besides]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
