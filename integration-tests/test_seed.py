"""Tests draw the same cases every time, others with a seed; a failure says how to run it again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from integration_lab import PATIENCE

CONFTEST = Path(__file__).parents[1] / "packages" / "conftest.py"
DRAWS = """
from hypothesis import given, settings, strategies as st

drawn = []

@settings(max_examples=10)
@given(st.integers(0, 2**60))
def test_draws(number):
    drawn.append(number)

def test_fails():
    assert not drawn, f"drawn: {drawn}"
"""


def drawn(folder, *options):
    """What was drawn, and how the failed test says that it is run again."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci",
         *options],
        cwd=folder, env=os.environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (numbers,) = set(re.findall(r"drawn: \[(.*?)\]", done.stdout))
    (again,) = re.findall(r"^hatch run one .*", done.stdout, re.MULTILINE)
    return numbers, again


@pytest.mark.slow
@pytest.mark.processes
def test_the_option(tmp_path):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_draws.py").write_text(DRAWS)
    usual, again = drawn(tmp_path)
    assert again == "hatch run one test_draws.py::test_fails"
    assert drawn(tmp_path) == (usual, again)
    seeded, again = drawn(tmp_path, "--seed", "7")
    assert again == "hatch run one test_draws.py::test_fails --seed 7"
    assert drawn(tmp_path, "--seed", "7") == (seeded, again)
    assert len({usual, seeded, drawn(tmp_path, "--seed", "8")[0]}) == 3
