"""Shared by tests with real processes: a trainer, executors, and proof that nothing survives."""

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_local import LocalProcessExecutor

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that several tests share

from local_lab import PATIENCE, results_of, wait_until

#: Set in the environment of everything that a test starts, supervisors included.
TEST_MARK = "DILOCO_LOCAL_TEST"

TRAINER = '''
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from diloco_protocol import DilocoError


def echo(**kwargs):
    print("echo from", os.environ["REPLICA_RANK"], flush=True)
    print("aside from", os.environ["REPLICA_RANK"], file=sys.stderr, flush=True)
    return kwargs


def environment():
    return {name: os.environ.get(name) for name in sorted(os.environ)}


def where():
    return {"cwd": os.getcwd(), "python": sys.executable, "group": os.getpgrp(),
            "session": os.getsid(0)}


def big(size):
    return "x" * size


def unserialisable():
    return object()


def fail(message="boom"):
    print("about to fail", flush=True)
    raise ValueError(message)


def leave(code):
    sys.exit(code)


def interrupt():
    raise KeyboardInterrupt


def hard_exit(code):
    os._exit(code)


def die(number):
    os.kill(os.getpid(), number)
    time.sleep(600)


def wait(folder, name="go", seconds=600):
    """Says that it is there, waits for a file, and returns."""
    rank = os.environ["REPLICA_RANK"]
    partial = Path(folder, f"partial-{rank}")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder, f"up-{rank}-{os.environ['DILOCO_ATTEMPT']}"))  # never seen empty
    print("waiting", flush=True)
    deadline = time.monotonic() + seconds
    while not Path(folder, name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)
    print("went on", flush=True)
    return int(rank)


def stubborn(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait(folder)


def deaf(folder):
    """Says that it was told to end, and goes on."""
    told = Path(folder, "told-" + os.environ["REPLICA_RANK"])
    signal.signal(signal.SIGTERM, lambda *_: told.touch())
    return wait(folder)


def polite(folder):
    """Ends with success when it is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: Path(folder, "go").touch())
    return wait(folder)


def leaver(folder):
    """Leaves with 0 when it is told to end, before its work is done."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return wait(folder)


def family(folder):
    """Has a child in its group, one in its own session, and an orphan without environment."""
    program = ("import sys, os, time; open(sys.argv[1], 'w').write(str(os.getpid())); "
               "time.sleep(600)")
    def child(name):
        return [sys.executable, "-S", "-c", program, str(Path(folder, name))]
    subprocess.Popen(child("pid-group"))
    subprocess.Popen(child("pid-session"), start_new_session=True)
    subprocess.Popen(
        ["sh", "-c", '"$@" & exit 0', "sh", "env", "-i", "setsid", *child("pid-orphan")]
    ).wait()
    for name in ("pid-group", "pid-session", "pid-orphan"):
        while not (Path(folder, name).exists() and Path(folder, name).read_text()):
            time.sleep(0.01)
    return wait(folder)


def slips_away(folder, when):
    """Leaves an orphan without environment, and kills its runner: at once, or when told to end."""
    def leave(*_):
        pid = Path(folder, "pid-orphan")
        program = ("import sys, os, time; open(sys.argv[1], 'w').write(str(os.getpid())); "
                   "time.sleep(60)")
        child = [sys.executable, "-S", "-c", program, str(pid)]
        subprocess.Popen(["sh", "-c", '"$@" & exit 0', "sh", "env", "-i", "setsid", *child])
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(1)
    if os.environ["REPLICA_RANK"] == "0" and os.environ["DILOCO_ATTEMPT"] == "1":
        leave() if when == "at once" else signal.signal(signal.SIGTERM, leave)
    return wait(folder)


def is_replaced():
    error = DilocoError("another process has the rank")
    error.final = True
    raise error


def whether_it_comes_back():
    return os.environ.get("DILOCO_RESTARTS")


def until_attempt(number):
    attempt = int(os.environ["DILOCO_ATTEMPT"])
    print("attempt", attempt, flush=True)
    if attempt < number:
        raise RuntimeError(f"attempt {attempt} fails")
    return attempt
'''


#: What of the standard suite is tried with real processes at every change; the slow lane tries all
#: of it.
SAMPLE = {
    "test_any_sequence_keeps_every_promise",
    "test_c3_cancel_has_the_declared_scope",
    "test_c5_what_is_cancelled_ends",
    "test_e1_every_variable_arrives_as_it_was_given",
    "test_e2_a_replica_is_told_its_run_and_its_attempt",
    "test_g2_only_a_newline_ends_a_line",
    "test_g3_what_lives_is_followed",
    "test_g4_the_streams_are_kept_apart",
    "test_l3_the_same_run_id_is_the_same_run",
    "test_l6_replicas_are_told_who_they_are",
    "test_l8_a_part_of_a_run",
    "test_l9_a_failed_attempt_is_started_again",
    "test_r3_collecting_again_gives_the_same",
    "test_r5_large_results_arrive",
    "test_s4_every_rank_for_itself",
    "test_s7_a_timeout_is_a_failure",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        real = item.path.parent == Path(__file__).parent and "TestReal::" in item.nodeid
        if real and item.originalname not in SAMPLE:
            item.add_marker(pytest.mark.slow)


def _marked(value):
    wanted = f"{TEST_MARK}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(
                        (
                            int(entry.name),
                            (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                        )
                    )
            except OSError:
                continue
    return found


@pytest.fixture(scope="session")
def until():
    return wait_until


@pytest.fixture
def nothing_survives(monkeypatch):
    """All that a test has started, directly or not, ends by itself once the test is over."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(TEST_MARK, value)
    yield lambda: _marked(value)
    if not Path("/proc").exists():
        return
    deadline = time.monotonic() + PATIENCE
    while (left := _marked(value)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes survived the test: {left}"


@pytest.fixture
def make(tmp_path, nothing_survives):
    """Makes executors whose replicas find the trainer module; ends all runs afterwards."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    roots = set()

    def make(**options):
        options = {"root": tmp_path / "state", "pythonpath": [tmp_path], "grace": 1.0, **options}
        roots.add(options["root"])
        return LocalProcessExecutor(**options)

    yield make
    for root in roots:
        executor = LocalProcessExecutor(root=root)
        for run_id in executor.list_runs():
            handles = executor.attach(run_id)
            executor.cancel_run(run_id)
            results = results_of(executor, handles)
            assert all(
                result["status"] in {"succeeded", "failed", "cancelled"} for result in results
            )


@pytest.fixture
def folder(tmp_path):
    """Where the trainer's functions leave and look for files."""
    path = tmp_path / "signs"
    path.mkdir()
    return path


@pytest.fixture
def waiting(make, folder):
    """Launches replicas that run until the file ``go`` is in ``signs``; waits until all are up.

    Replicas that have ended are not waited for.
    """

    def launch(n=1, function="wait", executor=None, signs=folder, **options):
        executor = executor or make()
        handles = executor.launch_replicas(
            n, f"trainer:{function}", {"folder": str(signs)}, **options
        )
        marks = [signs / f"up-{rank}-1" for rank in range(n)]
        for mark, handle in zip(marks, handles, strict=True):
            wait_until(
                lambda mark=mark, handle=handle: mark.exists() or executor.poll(handle).terminal,
                f"the start of rank {handle.rank}",
            )
        return SimpleNamespace(
            executor=executor,
            handles=handles,
            handle=handles[0],
            signs=signs,
            go=(signs / "go").touch,
            up=lambda: all(mark.exists() for mark in marks),
            pid=lambda rank=0: int(marks[rank].read_text()),
        )

    return launch


@pytest.fixture
def overrunning(waiting, folder):
    """Launches a replica that will run into its timeout, but not before ``ready(run)`` was true.

    How long a program takes to start is the machine's affair, so a timeout that was too short for
    it is tried longer.
    """

    def launch(ready=lambda run: True, **options):
        for timeout in (1.0, 4.0, 16.0, 64.0, 240.0):
            signs = folder / f"timeout-{timeout:g}"
            signs.mkdir()
            run = waiting(timeout=timeout, signs=signs, **options)
            if run.up() and ready(run):
                return run
        raise AssertionError("this machine takes minutes to start a program")

    return launch
