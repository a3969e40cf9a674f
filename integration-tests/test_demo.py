"""The demo as a user runs it: it ends with its files, and leaves no process behind, also when it is interrupted."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

LAUNCH = Path(__file__).parents[1] / "tools" / "demo" / "launch.py"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(LAUNCH), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def processes_of(folder):
    """Processes that have a folder in their command line or environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(folder).encode() in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                    found.append(int(process.name))
    return found


def assert_nothing_runs(folder):
    if sys.platform == "linux":
        deadline = time.monotonic() + 10  # the supervisor goes a moment after the last replica
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


def test_the_quick_demo(tmp_path):
    demo = start("--quick", "--replicas", "2", "--output", str(tmp_path))
    out, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0, out
    assert "sync   3  step 60/60" in out
    assert "validation loss" in out
    folder = tmp_path / "run-1"
    summary = json.loads((folder / "summary.json").read_text())
    assert all(math.isfinite(loss) and loss > 0 for loss in summary["validation_loss"].values())
    assert summary["gain"]["nats_per_byte"] == pytest.approx(
        summary["validation_loss"]["lone"] - summary["validation_loss"]["diloco"]
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted((line["run"], line["rank"], line["total_inner_steps"]) for line in lines) == sorted(
        [("diloco", rank, step) for rank in (0, 1) for step in (20, 40, 60)]
        + [("lone", 0, step) for step in (20, 40, 60)]
    )
    assert load_file(folder / "diloco.safetensors").keys() == load_file(folder / "lone.safetensors").keys()
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert_nothing_runs(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(tmp_path, number):
    demo = start("--steps", "100000", "--sync-every", "10", "--output", str(tmp_path))
    for line in demo.stdout:
        if line.startswith("sync   1"):
            break
    demo.send_signal(number)
    out, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "all replicas have been ended" in out
    assert "Traceback" not in out
    assert_nothing_runs(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the replica's process in /proc")
def test_a_failed_replica_is_named_and_the_others_are_ended(tmp_path):
    demo = start("--steps", "100000", "--sync-every", "10", "--output", str(tmp_path))
    for line in demo.stdout:
        if line.startswith("sync   1"):
            break
    replica = tmp_path / "run-1"
    (victim,) = [
        pid for pid in processes_of(replica) if b"REPLICA_RANK=2\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(victim, signal.SIGKILL)
    out, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "rank 2 of run 'diloco' failed" in out
    assert "SIGKILL" in out
    assert_nothing_runs(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--replicas", "0"], "--replicas must be from 1 to 64, not 0"),
        (["--steps", "3"], "--steps must be at least 20, not 3"),
        (["--steps", "50", "--sync-every", "51"], "--sync-every must be from 1 to the number of steps"),
        (["--output", "/proc/nothing/here"], "cannot be written"),
        (["--seed", "x"], "invalid int value"),
    ],
)
def test_wrong_arguments(arguments, told):
    demo = start(*arguments)
    out, _ = demo.communicate(timeout=60)
    assert demo.returncode != 0
    assert told in out
    assert "Traceback" not in out
