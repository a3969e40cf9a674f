"""``python -m diloco_localcloud modal``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import modal
import pytest
from standin_lab import PATIENCE

NAMES = [
    "MODAL_SERVER_URL",
    "MODAL_TOKEN_ID",
    "MODAL_TOKEN_SECRET",
    "MODAL_CONFIG_PATH",
    "NO_PROXY",
]


def until(predicate):
    deadline = time.monotonic() + PATIENCE
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def call_a_function(*token):
    client = modal.Client.from_credentials(*token)
    app = modal.App("shipped", include_source=False)
    function = app.function(name="train", serialized=True)(lambda rank: rank + 1)
    app.deploy(client=client)
    assert function.spawn(2).get(timeout=PATIENCE) == 3
    client.__exit__(None, None, None)


@pytest.mark.processes
def test_the_command(monkeypatch):
    command = [sys.executable, "-m", "diloco_localcloud", "modal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            lines = [running.stdout.readline() for _ in range(6)]
            told = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines[:5])
            assert list(told) == NAMES
            assert "Ctrl-C ends it" in lines[5]
            for name, value in told.items():
                monkeypatch.setenv(name, value)
            call_a_function(told["MODAL_TOKEN_ID"], told["MODAL_TOKEN_SECRET"])
            running.send_signal(signal.SIGINT)
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()


def kept_waiting():
    """A long function whose process leaves the group; sent along, as no module has it."""

    def run(path):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(path).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)

    return run


@pytest.mark.slow
@pytest.mark.processes
def test_a_stand_in_that_is_killed_leaves_no_process(monkeypatch, tmp_path):
    """Its files stay, and whoever kills it has to know."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "diloco_localcloud", "modal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            for line in [running.stdout.readline() for _ in range(6)][:5]:
                name, value = line.removeprefix("export ").strip().split("=", 1)
                monkeypatch.setenv(name, value)
            token = os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"]
            client = modal.Client.from_credentials(*token)
            app = modal.App("shipped", include_source=False)
            function = app.function(name="train", serialized=True)(kept_waiting())
            app.deploy(client=client)
            function.spawn(str(tmp_path / "pids"))
            client.__exit__(None, None, None)
            until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
        finally:
            running.kill()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
