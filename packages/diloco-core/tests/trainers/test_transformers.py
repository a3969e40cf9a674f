"""Replicas that are trained by Hugging Face's ``Trainer``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPLICA = Path(__file__).with_name("replica.py")
KILLED, TERMINATED = -9, 143


def start(folder, rank=0, world=1, **wanted):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(REPLICA), str(folder), json.dumps(wanted)],
        env={**os.environ, "REPLICA_RANK": str(rank), "REPLICA_WORLD_SIZE": str(world)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder, code=0, **wanted):
    """Run a lone replica to its end; returns what it wrote and what it ended with."""
    replica = start(folder, **wanted)
    output, _ = replica.communicate()
    assert replica.returncode == code, output
    end = folder / "end-0.json"
    return output, json.loads(end.read_text()) if end.exists() else None


CASES = {
    "three epochs": {},
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2}},
    "evaluation after every epoch": {"arguments": {"eval_strategy": "epoch"}},
    "evaluation, and the best model": {
        "arguments": {
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "steps",
            "save_steps": 4,
            "load_best_model_at_end": True,
        }
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [2, 13, 24])
def test_a_replica_that_is_killed_ends_as_one_that_was_not(tmp_path, case, step):
    _, expected = run(tmp_path / "never", **CASES[case])
    step = min(step, expected["step"] - 1)
    run(tmp_path / "killed", code=KILLED, killed=[step, "SIGKILL"], **CASES[case])
    _, end = run(tmp_path / "killed", **CASES[case])
    assert end["digest"] == expected["digest"]
    assert (end["step"], end["inner_steps"]) == (expected["step"], expected["inner_steps"])
    assert end["epoch"] == expected["epoch"] == 3
    logged = {each["step"]: each for each in expected["log"] if "loss" in each}
    again = [each for each in end["log"] if "loss" in each]
    assert again
    for each in again:
        assert each == logged[each["step"]]
