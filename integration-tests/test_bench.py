"""The benchmarks run: what they print is judged by people, on a quiet machine."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "tools/bench"


@pytest.mark.parametrize(
    ("script", "arguments", "printed"),
    [
        ("run.py", ["--replicas", "2", "--parameters", "20000", "--rounds", "1"], "peak memory"),
    ],
)
def test_a_benchmark_prints_its_table(tmp_path, script, arguments, printed):
    command = [sys.executable, BENCH / script, *arguments, "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
