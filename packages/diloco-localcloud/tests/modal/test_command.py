"""``python -m diloco_localcloud modal``."""

from __future__ import annotations

import signal
import subprocess
import sys

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
    command += ["--grace-seconds", "1"]
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
