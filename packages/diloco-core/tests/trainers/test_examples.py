"""The examples of trainers, each as two processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from diloco_core import export

pytestmark = pytest.mark.trainers
HERE, EXAMPLES = Path(__file__).parent, Path(tiny.__file__).parent
# What an example needs, beside transformers.
NEEDS = {
    "with_trainer": "transformers",
    "with_muon": "transformers",
    "with_lightning": "lightning",
    "with_sft": "trl",
    "with_grpo": "trl",
}


def start(file, rank, folder, steps, **variables):
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1", **variables}
    return tiny.start(file, rank, folder / "run", steps, stderr=subprocess.PIPE, env=env)


def ends(*replicas):
    """Wait for replicas; returns what their trainers returned."""
    results = []
    for replica in replicas:
        out, err = replica.communicate()
        assert replica.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    return results


def exported(folder):
    export(folder / "run", folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", NEEDS)
def test_an_example(tmp_path, name):
    pytest.importorskip(NEEDS[name])
    file = EXAMPLES / f"{name}.py"
    for result in ends(*(start(file, rank, tmp_path, 20) for rank in range(2))):
        assert result == 20 if isinstance(result, int) else result[0] == 20
    assert exported(tmp_path)


# Epochs have 25 steps, and a sync comes every 10.
@pytest.mark.parametrize("steps", [25, 37, 50])
def test_a_replica_of_lightning_comes_back_in_an_epoch_and_at_its_end(tmp_path, steps):
    check_lightning(tmp_path, killed_after=steps, expected=60)


def test_a_replica_of_lightning_comes_back_where_the_epochs_are_counted(tmp_path):
    check_lightning(tmp_path, killed_after=24, expected=26, BY_EPOCHS="1")


def check_lightning(tmp_path, killed_after, expected, **variables):
    pytest.importorskip("lightning")
    file = HERE / "lightning_replica.py"
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    replicas = (start(file, rank, undisturbed, 60, **variables) for rank in range(2))
    assert ends(*replicas) == [expected] * 2
    first = start(file, 0, stopped, 60, **variables)
    killed = start(file, 1, stopped, 60, KILLED_AFTER=str(killed_after), **variables)
    _, log = killed.communicate()
    assert killed.returncode == -9, log
    assert ends(first, start(file, 1, stopped, 60, **variables)) == [expected] * 2
    values = exported(stopped)
    for name, expected in exported(undisturbed).items():
        assert torch.equal(values[name], expected), name
