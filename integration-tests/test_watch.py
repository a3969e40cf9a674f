"""``diloco watch`` on a terminal, of a run that loses a replica and gets it back."""

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import uuid

import pytest
import torch
from integration_lab import PATIENCE
from rehearsal_lab import RUN, diloco, empty_home, processes_of, python_path, wait_for
from safetensors.torch import load_file

from diloco_core import DiLoCo, _connect, _timing, connect, open_journal
from diloco_core._exchange import _telemetry
from diloco_core.testing import run_replicas
from diloco_eks import EKSExecutor
from diloco_local import LocalProcessExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff

TRAINER = """
import os, time
from pathlib import Path

import torch

from diloco_core import DiLoCo, connect


def train(folder, steps):
    while Path(folder, "gone").exists():
        time.sleep(0.02)
    exchange = connect()
    Path(folder, f"pid-{exchange.rank}").write_text(str(os.getpid()))
    model = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    with DiLoCo(model, inner, exchange, sync_every=50) as outer:
        while outer.inner_steps < steps:
            loss = (model(torch.ones(1, 4)) - 1).square().sum()
            loss.backward()
            outer.log(loss=loss.item())
            inner.step()
            inner.zero_grad()
            if not Path(folder, "go").exists():
                time.sleep(0.1)
"""
MARK = "DILOCO_WATCHED"
STYLE = re.compile("\x1b\\[[0-9;?]*[a-zA-Z]")

pytestmark = pytest.mark.processes


class Frames:
    """What a command draws on a terminal of its own."""

    def __init__(self, words, folder, environ, columns):
        self.text = ""
        terminal, other = os.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, cwd=folder, env=environ,
            start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self._thread = threading.Thread(target=self._read, args=(terminal,), daemon=True)
        self._thread.start()

    def _read(self, terminal):
        with contextlib.suppress(OSError):  # the other end is closed, on Linux
            while piece := os.read(terminal, 65536):
                self.text += piece.decode(errors="replace")
        os.close(terminal)

    def rows(self):
        """The words of the last row that was drawn of each rank, by rank."""
        lines = STYLE.sub("", self.text).replace("\r", "\n").splitlines()
        return {line.split()[0]: line for line in lines if line[:4].strip().isdecimal()}

    def end(self):
        """Wait for the end; the exit code."""
        code = self.process.wait(PATIENCE)
        self._thread.join(PATIENCE)
        return code


def arguments(folder, uri, steps):
    """The arguments of the trainer, with the place where its replicas meet."""
    return {
        "trainer_module": "watched",
        "trainer_kwargs": {"folder": str(folder), "steps": steps},
        "rendezvous_uri": uri,
    }


@contextlib.contextmanager
def drawn(words, folder, environ):
    """What a command draws on a wide terminal; it is killed if it has not ended."""
    frames = Frames(words, folder, environ, 160)
    try:
        yield frames
    finally:
        frames.process.kill()
        frames.end()


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A run of two replicas that goes on until the file ``go`` is there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    (tmp_path / "watched.py").write_text(TRAINER)
    with LocalProcessExecutor(pythonpath=[tmp_path], env={"OMP_NUM_THREADS": "1"}) as executor:
        handles = executor.launch_replicas(
            2,
            RUN,
            arguments(tmp_path, str(tmp_path / "run"), 4000),
            run_id="watched",
            max_restarts=2,
            timeout=PATIENCE,
        )
        wait_for(lambda: len(list((tmp_path / "run/live").glob("0*.json"))) == 2, "the start")
        yield executor
        executor.cancel_run("watched")
        executor.collect(handles, timeout=PATIENCE)


def test_a_replica_is_killed_and_comes_back_while_it_is_watched(tmp_path, local):
    environ = {**os.environ, "TERM": "xterm-256color", "HOME": str(tmp_path / "home")}
    environ = {name: text for name, text in environ.items() if name not in {"COLUMNS", "NO_COLOR"}}
    words = [sys.executable, "-m", "diloco_cli", "watch", "--every", "1"]
    words += ["--backend", "local_process"]
    wide = Frames([*words, "./run"], tmp_path, environ, 160)
    named = Frames([*words, "watched"], tmp_path, environ, 160)  # it finds the store by itself
    narrow = Frames([*words, "./run"], tmp_path, environ, 40)

    def shows(frames, *rows):
        drawn = frames.rows()
        return all(re.search(row, drawn.get(str(rank), "")) for rank, row in enumerate(rows))

    training = r"running .*(training|waiting|contributing|adopting|updating|idle)"
    for frames in (wide, named):
        wait_for(lambda f=frames: shows(f, training, training), "that both run")
    wait_for(lambda: shows(narrow, "running", "running"), "that both run")
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    wait_for(lambda: shows(wide, "running", "pending|was |silent"), "the loss")
    wait_for(lambda: shows(wide, "", r"running +2 +\d+ +(?!was|silent)\w+"), "that it is back")
    narrow.process.send_signal(signal.SIGINT)
    assert narrow.end() == 130
    assert "left as it is. Come back with:\r\n  diloco watch ./run --every 1" in narrow.text
    frame = STYLE.sub("", narrow.text).partition("run ./run is left")[0]
    assert max(map(len, re.split("[\r\n]+", frame))) <= 41  # with what Ctrl-C itself may show
    (tmp_path / "go").touch()
    for frames in (wide, named):
        assert frames.end() == 0
        assert shows(frames, "succeeded +completed", "succeeded +completed +2")
        last = STYLE.sub("", frames.text)[-2000:]
        assert "sync 80" in last
        assert "quorum 2 of 2" in last
        assert "loss of rank " in last
    assert wide.text.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.slow
def test_a_run_on_kubernetes_that_meets_in_s3_is_seen_by_the_command_alone(tmp_path, s3):
    """By the store alone, a killed replica is silent; then it is what the cluster says; then back.

    All from an empty home. The records of the cluster can be purged without changing the status.
    """
    uri, mark, gone = "s3://bucket/runs/seen", uuid.uuid4().hex, tmp_path / "gone"
    (tmp_path / "watched.py").write_text(TRAINER)
    (tmp_path / "home").mkdir()
    words = [sys.executable, "-m", "diloco_cli", "watch", uri, "--every", "1"]
    terminal = empty_home(tmp_path, TERM="xterm-256color", **s3)
    pods = {**s3, "PYTHONPATH": python_path(tmp_path), "OMP_NUM_THREADS": "1", MARK: mark}
    with contextlib.ExitStack() as opened:
        stand_in = opened.enter_context(KubernetesProcesses(backoff_seconds=0.5))
        kubeconfig = str(stand_in.kubeconfig(tmp_path / "kubeconfig"))
        cluster = {**s3, "KUBECONFIG": kubeconfig, "DILOCO_OPTIONS": "eks.image=any/image:1"}
        executor = opened.enter_context(
            EKSExecutor(
                "any/image:1", kubeconfig=kubeconfig, env=pods, grace=2.0, backoff_limit=3,
                on_replica_failure="continue", journal=open_journal(uri),
                backoff=Backoff(first=0.1, factor=1.2, cap=0.5),
            )
        )  # fmt: skip
        handles = executor.launch_replicas(2, RUN, arguments(tmp_path, uri, 1000), run_id="seen")
        by_store = opened.enter_context(drawn(words, tmp_path, terminal))

        def row(frames):
            return frames.rows().get("1", "")

        wait_for(lambda: re.search("training|waiting", row(by_store)), "that both are seen")
        gone.touch()  # so that the next attempt waits before it connects
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        wait_for(lambda: re.search(r"silent \d+s, was ", row(by_store)), "the silence")
        assert not re.search("failed|running", row(by_store)), "nobody has said so"
        by_both = opened.enter_context(drawn(words, tmp_path, {**terminal, **cluster}))
        wait_for(lambda: re.search(r"running +2 +\d+ +was ", row(by_both)), "the cluster's word")
        gone.unlink()
        for frames in (by_store, by_both):
            wait_for(
                lambda f=frames: re.search(r" 2 +\d+ +(?!was|silent)\w+", row(f)), "its return"
            )
        (tmp_path / "go").touch()
        assert (by_store.end(), by_both.end()) == (0, 0)
        ends = executor.collect(handles, timeout=PATIENCE)
        assert [(each["status"], each["attempt"]) for each in ends] == [
            ("succeeded", 1), ("succeeded", 2),
        ]  # fmt: skip
        exported = diloco(tmp_path, "export", uri, "model.safetensors", **s3)
        assert exported.returncode == 0, exported.stderr
        assert load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}
        reported = diloco(tmp_path, "report", uri, "-o", "page.html", "--json", **s3)
        facts = json.loads(reported.stdout)
        assert (facts["run_id"], facts["sync"], facts["backend"]["name"]) == ("seen", 20, "eks")
        lives = {each["rank"]: each["epoch"] for each in facts["incarnations"]}
        assert lives == {0: 1, 1: 2}
        assert "<title>Run seen</title>" in (tmp_path / "page.html").read_text()
        before = diloco(tmp_path, "status", uri, "--json", **s3)
        purged = diloco(tmp_path, "purge", uri, "--yes", **cluster)
        assert purged.returncode == 0, purged.stderr
        assert not executor.exists("seen")
        after = diloco(tmp_path, "status", uri, "--json", **s3)
        assert (after.returncode, after.stdout) == (0, before.stdout)
    wait_for(lambda: not processes_of(MARK, mark), "every process to be gone")


class Throttled:
    """A store that refuses every other object below live/, and takes none when it is told to."""

    def __init__(self, store, asked, hangs):
        self._store, self._asked, self._hangs = store, asked, hangs

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        if key.startswith("live/"):
            self._asked.append(key)
            assert not self._hangs.is_set() or threading.Event().wait(PATIENCE)
            if self._asked.count(key) % 2 == 0:
                raise OSError("503 SlowDown")
        return self._store.put(key, parts)


def losses(uri, pause=lambda step: None, **options):
    """Train two replicas in threads; the loss of each at every step."""

    def train(exchange):
        model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            for values in model.parameters():
                values.fill_(exchange.rank + 1)
        inner = torch.optim.SGD(model.parameters(), 0.01)
        seen = []
        with DiLoCo(model, inner, exchange, sync_every=2) as outer:
            for step in range(12):
                if exchange.rank == 0:
                    pause(step)
                loss = (model(torch.ones(1, 4)) - 1).square().sum()
                loss.backward()
                seen.append(loss.item())
                outer.log(loss=loss.item())
                inner.step()
                inner.zero_grad()
        return seen

    return run_replicas(train, [connect(uri, rank=n, world_size=2, **options) for n in range(2)])


def test_a_store_that_throttles_and_hangs_while_it_is_watched(tmp_path, monkeypatch):
    """The loss is the same to the bit, and what was told before is shown."""
    monkeypatch.setattr(_telemetry, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(_telemetry, "_END_SECONDS", 0.01)
    monkeypatch.setattr(_timing, "_STOP_SECONDS", 0.01)
    monkeypatch.setattr(_telemetry, "live_seconds", lambda replicas: 0.01)
    expected = losses(str(tmp_path / "expected"), telemetry=False)
    asked, hangs = [], threading.Event()
    opened = _connect.open_store
    monkeypatch.setattr(
        _connect, "open_store", lambda *args, **more: Throttled(opened(*args, **more), asked, hangs)
    )
    environ = {**os.environ, "TERM": "xterm-256color", "HOME": str(tmp_path / "home")}
    words = [sys.executable, "-m", "diloco_cli", "watch", "./run", "--every", "1"]
    watched = []

    def pause(step):
        if step == 4:
            wait_for(lambda: len(asked) > 20, "requests that are refused")
            watched.append(Frames(words, tmp_path, environ, 160))
        if step == 6:
            wait_for(lambda: len(watched[0].rows()) == 2, "both ranks")
            hangs.set()

    try:
        assert losses(str(tmp_path / "run"), pause) == expected
        rows = watched[0].rows()
        phase = re.compile(r"\d+ +(training|contrib|waiting|updating)")
        assert all(phase.search(rows[number]) for number in "01"), rows
    finally:
        for frames in watched:
            frames.process.send_signal(signal.SIGINT)
            assert frames.end() == 130
