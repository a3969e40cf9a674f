"""``hatch run bench`` prints its tables; what they say is judged by people, on a quiet machine."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "tools/bench/run.py"


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--no-memory"], "gloo all_reduce"),
        pytest.param([], "peak memory", marks=pytest.mark.slow),
    ],
)
def test_it_prints_its_tables(tmp_path, options, printed):
    small = ["--replicas", "2", "--parameters", "20000", "--rounds", "1", "--folder", str(tmp_path)]
    command = [sys.executable, str(BENCH), *small, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
