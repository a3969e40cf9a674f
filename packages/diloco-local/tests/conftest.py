"""What the tests with real processes share: a trainer module, executors, and the proof that nothing survives."""

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_local import LocalProcessExecutor

sys.path.insert(0, str(Path(__file__).parent))  # the worlds of the standard suite

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


def echo(**kwargs):
    print("echo from", os.environ["REPLICA_RANK"], flush=True)
    print("aside from", os.environ["REPLICA_RANK"], file=sys.stderr, flush=True)
    return kwargs


def environment():
    return {name: os.environ.get(name) for name in sorted(os.environ)}


def where():
    return {"cwd": os.getcwd(), "python": sys.executable, "group": os.getpgrp(), "session": os.getsid(0)}


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
    time.sleep(60)


def wait(folder, name="go", seconds=60):
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


def polite(folder):
    """Ends with success when it is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: Path(folder, "go").touch())
    return wait(folder)


def family(folder):
    """Has a child in its group, one in a session of its own, and an orphan that cleared its environment."""
    program = "import sys, os, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    def child(name):
        return [sys.executable, "-S", "-c", program, str(Path(folder, name))]
    subprocess.Popen(child("pid-group"))
    subprocess.Popen(child("pid-session"), start_new_session=True)
    subprocess.Popen(["sh", "-c", '"$@" & exit 0', "sh", "env", "-i", "setsid", *child("pid-orphan")]).wait()
    deadline = time.monotonic() + 30
    for name in ("pid-group", "pid-session", "pid-orphan"):
        while not (Path(folder, name).exists() and Path(folder, name).read_text()):
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            time.sleep(0.01)
    return wait(folder)


def until_attempt(number):
    attempt = int(os.environ["DILOCO_ATTEMPT"])
    print("attempt", attempt, flush=True)
    if attempt < number:
        raise RuntimeError(f"attempt {attempt} fails")
    return attempt
'''


def wait_until(condition, what="it", seconds=20.0):
    """Poll until ``condition()`` is true, and return what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.01)


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
    """Everything a test has started, and everything that started, must be gone soon after it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(TEST_MARK, value)
    yield lambda: _marked(value)
    if not Path("/proc").exists():
        return
    deadline = time.monotonic() + 5
    while _marked(value) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = _marked(value)
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes survived the test: {left}"


@pytest.fixture
def make(tmp_path, nothing_survives):
    """Makes executors whose replicas find the trainer module; ends all runs of the test afterwards."""
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
            for handle in handles:
                executor.cancel(handle)
            results = executor.collect(handles, timeout=20)
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
    """Launches replicas that run until the file ``go`` appears in ``folder``, and waits until all are up."""

    def launch(n=1, function="wait", executor=None, **options):
        executor = executor or make()
        handles = executor.launch_replicas(
            n, f"trainer:{function}", {"folder": str(folder)}, **options
        )
        for rank in range(n):
            wait_until((folder / f"up-{rank}-1").exists, f"the start of rank {rank}")
        return SimpleNamespace(
            executor=executor,
            handles=handles,
            handle=handles[0],
            go=(folder / "go").touch,
            pid=lambda rank=0: int((folder / f"up-{rank}-1").read_text()),
        )

    return launch
