"""Every example runs and does what it claims.

The examples of diloco-conformance are tests, which pytest finds by itself.
"""

import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"

SAYS = {
    "diloco-core/examples/plain_loop.py": r"""
        rank 0: 3 outer steps, last loss 0\.\d+
        rank 1: 3 outer steps, last loss 0\.\d+
        rank 2: 3 outer steps, last loss 0\.\d+
        all replicas hold the same model, to the last bit
    """,
    "diloco-core/examples/elastic_run.py": r"""
        rank 2 came back, and went on with its batch number \d+
        all replicas hold the model that the store holds
    """,
    "diloco-core/examples/unequal_replicas.py": r"""
        rank 0 contributed \d+ inner steps to 4 syncs
        rank 1 contributed \d+ inner steps to 4 syncs
        both replicas hold the same model
    """,
    "diloco-core/examples/custom_exchange.py": r"""
        4 outer steps, and all replicas hold the same model
    """,
    "diloco-protocol/examples/run_one_replica.py": r"""
        exit code 0, result 'hello world, from rank 1 of 2'
        the second replica fails on purpose:
        exit code 1, TypeError: .*unexpected keyword argument 'nobody'
    """,
    "diloco-local/examples/launch_and_collect.py": r"""
        log of rank 0: part 0 of rank 0
        log of rank 0: part 1 of rank 0
        log of rank 0: part 2 of rank 0
        0 succeeded \{'done': 3\}
        1 failed None
        rank 1 ended with exit code 1: ValueError: this rank has no data
    """,
    "diloco-cli/examples/what_goes_on.py": r"""
        0 runs go on
    """,
    "diloco-eks/examples/look_at_a_launch.py": r"""
        \{
          "apiVersion": "batch/v1",
          "kind": "Job",
        (?s:.*"completions": 4,.*"nvidia.com/gpu".*)
        \}
    """,
    "diloco-sagemaker/examples/look_at_a_launch.py": r"""
        \{
          "TrainingJobName": "diloco-example-00001",
        (?s:.*"InstanceType": "ml\.g6\.xlarge".*"EnableManagedSpotTraining": true.*)
        \}
    """,
    "diloco-modal/examples/look_at_a_launch.py": r"""
        \{
          "app": "my-app",
        (?s:.*"gpu": "H100:1".*"run_id": "example".*)
        \}
    """,
    "diloco-localcloud/examples/plain_http.py": r"""
        completed: 0, failed: 1
        FailureTarget: FailedIndexes
        Failed: FailedIndexes
    """,
}


def wanted(name):
    """What an example prints, as a pattern; its lines are indented here."""
    lines = SAYS[name].strip("\n").splitlines()[:-1]
    return "".join(line[8:] + "\n" for line in lines)


@pytest.mark.parametrize("name", [name for name in SAYS if "diloco-core" not in name])
@pytest.mark.processes
def test_an_example(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", PACKAGES / name],
        cwd=tmp_path,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert re.fullmatch(wanted(name), done.stdout), done.stdout


@pytest.mark.parametrize("name", [name for name in SAYS if "diloco-core" in name])
def test_an_example_of_core(name, capsys):
    # In this process, where torch has been imported already.
    runpy.run_path(str(PACKAGES / name), run_name="__main__")
    assert re.fullmatch(wanted(name), capsys.readouterr().out)


def test_no_batch_is_learned_twice_in_the_elastic_example_however_long_a_incarnation_is():
    """Inner state is saved every tenth sync: an incarnation that returns then skips few batches."""
    example = runpy.run_path(str(PACKAGES / "diloco-core/examples/elastic_run.py"))
    module = example["train"].__globals__
    batch, incarnations = module["batch"], {}

    def noted(rank, number):
        incarnations.setdefault((rank, threading.current_thread().name), []).append(number)
        return batch(rank, number)

    module.update(batch=noted, OUTER_STEPS=14)
    train = module["train"]
    module["train"] = lambda exchange, fails_after=None: train(exchange, fails_after and 12)
    example["main"]()
    assert len(incarnations) == 3
    for numbers in incarnations.values():
        assert numbers == sorted(set(numbers))
        assert len(numbers) >= 120


def test_every_example_is_here():
    programs = {
        path.relative_to(PACKAGES).as_posix()
        for path in PACKAGES.glob("*/examples/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert programs == set(SAYS)
    tested = {path.parts[-3] for path in PACKAGES.glob("*/examples/test_*.py")}
    assert tested | {name.partition("/")[0] for name in SAYS} == {
        path.name for path in PACKAGES.iterdir() if (path / "pyproject.toml").exists()
    }
