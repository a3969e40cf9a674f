"""Real replicas are killed at random, again and again; the run goes on and comes to the same place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_kill_9(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "tools/chaos/run.py"),
        "--replicas",
        "3",
        "--seconds",
        "40",
        "--kill-every",
        "6",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "TMPDIR": str(tmp_path)}, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for run in found.values():
        assert run["disagreements"] == 0
        assert run["failures"] == []
        assert run["longest_wait"] < run["grace"] + 1
    assert found["disturbed"]["kills"] >= 3
    # So short a run is not at its end yet, and the dead have learned less: untrained models have a loss of 2.3.
    assert found["disturbed"]["loss"] < found["undisturbed"]["loss"] + 0.15
    assert found["disturbed"]["accuracy"] > found["undisturbed"]["accuracy"] - 0.06
    assert found["disturbed"]["files"] < 150 + found["disturbed"]["syncs"]
    assert not list(tmp_path.glob("diloco-chaos-*"))
