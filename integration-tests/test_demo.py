"""The demo as a user runs it: it ends with its files and leaves no process, even if interrupted."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from integration_lab import PATIENCE
from safetensors.torch import load_file

pytestmark = pytest.mark.processes

LAUNCH = Path(__file__).parents[1] / "tools" / "demo" / "launch.py"


def start(folder, *arguments):
    """The demo with a mark in its environment, which every process that comes from it inherits."""
    return subprocess.Popen(
        [sys.executable, str(LAUNCH), "--output", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEMO_UNDER_TEST": str(folder)},
        start_new_session=True,
    )


def processes_of(folder):
    """Environments of the processes that carry the mark."""
    mark = f"DEMO_UNDER_TEST={folder}".encode()
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                if mark in environment:
                    found[int(process.name)] = environment
    return found


def read_until(demo, beginning):
    for line in demo.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"the demo ended before it printed {beginning!r}")


def assert_nothing_runs(folder):
    if sys.platform == "linux":
        deadline = (
            time.monotonic() + PATIENCE
        )  # the supervisor goes a moment after the last replica
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


def test_the_quick_demo_whose_replica_is_killed_and_comes_back(tmp_path):
    demo = start(tmp_path, "--quick", "--replicas", "2", "--kill", "0")
    out, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 0, out
    assert "kill -9" in out
    assert re.search(r"replica 0 is back since sync 2, step 40: .* second incarnation", out)
    assert "sync   3  step 60/60" in out
    assert "validation loss" in out
    assert max(map(len, out.partition("\nmodel ")[0].splitlines()[3:])) <= 100
    folder = tmp_path / "run-1"
    summary = json.loads((folder / "summary.json").read_text())
    killed, lived = (row["untold_seconds"] for row in summary["replicas"])
    assert killed > lived == 0, "the time without a process is not counted as compute"
    assert summary["replicas"][1]["syncs"] == 3
    losses = summary["validation_loss"]
    assert losses.keys() == {"diloco", "averaged", "lone"}
    assert all(math.isfinite(loss) and loss > 0 for loss in losses.values())
    assert summary["gain"]["nats_per_byte"] == pytest.approx(losses["lone"] - losses["diloco"])
    assert summary["sent_mb"]["averaged"] > summary["sent_mb"]["diloco"]
    told = json.loads((folder / "report.json").read_text())
    ends = [life["losses"][-1] for life in told["incarnations"] if life["losses"]]
    assert [step for step, _, _ in ends] == [60, 60]
    mean = sum(value for _, _, value in ends) / len(ends)
    assert mean == pytest.approx(losses["diloco"]), "the curve ends where the dot is"
    assert summary["sent_mb"]["diloco"] == pytest.approx(
        sum(life["bytes"]["sent"] for life in told["incarnations"]) / 2e6
    )
    assert [each["state"] for each in told["backend"]["replicas"]] == ["succeeded", "succeeded"]
    lines = [json.loads(line) for line in (folder / "alone.jsonl").read_text().splitlines()]
    steps = {(line["run"], line["rank"], line["total_inner_steps"]) for line in lines}
    for run in ("averaged", "lone"):
        assert {(run, 0, step) for step in (20, 40, 60)} <= steps
        (last,) = (line for line in lines if line["run"] == run and line["total_inner_steps"] == 60)
        assert last["valid"] == losses[run], "the curve ends where the dot is"
    models = [load_file(folder / f"{name}.safetensors").keys() for name in losses]
    assert models[0] == models[1] == models[2]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert out.endswith(f"\nreport   {folder}/report.html\n")
    assert "Run diloco" in (folder / "report.html").read_text()
    assert_nothing_runs(tmp_path)


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "a sync every"),
        (signal.SIGINT, "sync   1"),
        pytest.param(signal.SIGTERM, "sync   1", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path, number, moment):
    demo = start(tmp_path, "--replicas", "2", "--sync-every", "10")
    read_until(demo, moment)
    os.killpg(demo.pid, number)  # a terminal sends Ctrl-C to the whole group
    out, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 130
    assert "all replicas have been ended" in out
    assert "Traceback" not in out
    assert_nothing_runs(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the replica's process in /proc")
def test_a_failed_replica_is_named_and_the_others_are_ended(tmp_path):
    demo = start(tmp_path, "--replicas", "2", "--sync-every", "10")
    read_until(demo, "sync   1")
    (victim,) = [
        pid
        for pid, environment in processes_of(tmp_path).items()
        if b"REPLICA_RANK=1" in environment
    ]
    os.kill(victim, signal.SIGKILL)
    out, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 1
    assert "rank 1 of run 'diloco' failed" in out
    assert "SIGKILL" in out
    assert_nothing_runs(tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--replicas", "0"], "--replicas must be from 1 to 64, not 0"),
        (["--steps", "3"], "--steps must be at least 20, not 3"),
        (
            ["--steps", "50", "--sync-every", "51"],
            "--sync-every must be from 1 to the number of steps",
        ),
        (["--output", "/proc/nothing/here"], "cannot be written"),
        (["--seed", "-1"], "--seed must be from 0 to 4294967295, not -1"),
        (["--seed", "x"], "invalid int value"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, told):
    demo = start(tmp_path, *arguments)
    out, _ = demo.communicate(timeout=PATIENCE)
    assert demo.returncode != 0
    assert told in out
    assert "Traceback" not in out
    assert list(tmp_path.iterdir()) == []
