"""What the package shows."""

import importlib
import subprocess
import sys

import pytest

import diloco_cli


def test_all_is_sorted_and_documented():
    assert diloco_cli.__all__ == ["main"]
    assert diloco_cli.main.__doc__
    assert diloco_cli.__version__ == importlib.import_module("diloco_cli.__about__").__version__


@pytest.mark.processes
def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "diloco_cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"diloco, version {diloco_cli.__version__}\n"
