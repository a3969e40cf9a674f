"""Shared by the tests that start the command: local runs, and proof that nothing survives."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the module that several tests share

from cli_lab import PATIENCE

from diloco_local import LocalProcessExecutor

DILOCO = Path(sys.executable).parent / "diloco"
MARK = "DILOCO_CLI_TEST"
TRAINER = """
import os
import time
from pathlib import Path


def steps(count, fails=None):
    rank = int(os.environ["REPLICA_RANK"])
    for step in range(count):
        print(f"step {step} of rank {rank}", flush=True)
    if rank == fails:
        raise ValueError("no data")
    return {"steps": count}


def hostile(secret):
    print(f"\\x1b[2Jcleared\\ttoken={secret}", flush=True)
    raise ValueError(f"\\x1b]0;title\\x07 password={secret} " + "x" * 100_000)


def says(text):
    print(text, flush=True)


def waits(folder, rendezvous_uri=None):
    print("waiting", flush=True)
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    print("went on", flush=True)
    return 7
"""


class Laptop:
    """A machine with local runs, on which the command is started."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        (folder / "trainer.py").write_text(TRAINER)
        monkeypatch.setenv(MARK, self.mark)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.delenv("DILOCO_OPTIONS", raising=False)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        self.executor = LocalProcessExecutor(pythonpath=[folder], grace=1.0)

    def launch(self, function, arguments, run_id, n=1, *, wait=False):
        handles = self.executor.launch_replicas(
            n, f"trainer:{function}", arguments, run_id=run_id, timeout=PATIENCE
        )
        if wait:
            self.executor.collect(handles, timeout=PATIENCE)
        return handles

    def words(self, verb, *arguments, backend="local_process"):
        """The command line of a verb."""
        return [str(DILOCO), verb, *arguments, *(["--backend", backend] if backend else [])]

    def diloco(self, verb, *arguments, backend="local_process", **variables):
        """Run the console script without a terminal."""
        return subprocess.run(
            self.words(verb, *arguments, backend=backend),
            cwd=self.folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    @contextlib.contextmanager
    def started(self, verb, *arguments):
        """Start the console script; it is killed if it hangs, so that a test that reads ends."""
        with subprocess.Popen(
            self.words(verb, *arguments),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            limit = threading.Timer(PATIENCE, process.kill)
            limit.start()
            try:
                yield process
            finally:
                limit.cancel()
                process.kill()

    def processes(self):
        """All processes that this test has started, directly or not."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    made = Laptop(tmp_path, monkeypatch)
    yield made
    for run_id in made.executor.list_runs():
        made.executor.cancel_run(run_id)
        made.executor.collect(made.executor.attach(run_id), timeout=PATIENCE)
    if Path("/proc").exists():
        deadline = time.monotonic() + PATIENCE
        while (left := made.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes survived the test: {left}"
