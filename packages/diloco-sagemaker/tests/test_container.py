"""A job's command, started here with another ``/opt/ml``: what the runner takes and leaves."""

import json
import os
import subprocess
import sys

import pytest

from diloco_protocol import Outcome, Reason
from diloco_sagemaker._state._states import outcome_in

PROGRAM = """
def main(kind, text):
    if kind == "fails":
        raise ValueError("no data")
    return text * 2
"""


def run(job, folder):
    (folder / "trainer.py").write_text(PROGRAM)
    for name in ("input/config", "output", "model", "checkpoints"):
        (folder / name).mkdir(parents=True)
    strings = json.dumps(job["HyperParameters"])
    (folder / "input/config/hyperparameters.json").write_text(strings)
    words = [
        word.replace("/opt/ml", str(folder))
        for word in job["AlgorithmSpecification"]["ContainerArguments"]
    ]
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    return subprocess.run(
        [sys.executable, "-m", "diloco_protocol.runner", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.processes
@pytest.mark.parametrize("spot", [False, True])
def test_a_success_leaves_its_outcome(offline, tmp_path, spot):
    args = {"kind": "works", "text": "ü" * 4000}
    job = offline(spot=spot).plan(2, "trainer:main", args, run_id="run-1").requests[1]
    done = run(job, tmp_path)
    assert done.returncode == 0, done.stderr
    outcome = Outcome.from_json((tmp_path / "model/diloco-outcome.json").read_text())
    assert (outcome.result, outcome.exit_code) == ("ü" * 8000, 0)
    assert not (tmp_path / "output/failure").exists()
    assert (tmp_path / "checkpoints/.diloco-attempts.json").exists() is spot


@pytest.mark.processes
def test_a_failure_leaves_its_message_after_all_its_attempts(offline, tmp_path):
    args = {"kind": "fails", "text": ""}
    job = offline(max_restarts=1).plan(1, "trainer:main", args, run_id="run-1").requests[0]
    done = run(job, tmp_path)
    message = (tmp_path / "output/failure").read_text()
    assert len(message.encode()) <= 900
    outcome = outcome_in(f"AlgorithmError: {message}, exit code: {done.returncode}")
    assert (outcome.reason, outcome.exit_code, outcome.attempt) == (Reason.ERROR, 1, 2)
    assert "no data" in outcome.error
