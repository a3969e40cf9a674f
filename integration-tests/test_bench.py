"""``hatch run bench`` prints its tables; what they say is judged by people, on a quiet machine."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "tools/bench/run.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--no-memory", "--no-processes"], ["gloo all_reduce"]),
        pytest.param([], ["peak memory", "a sync with fsdp"], marks=pytest.mark.slow),
    ],
)
def test_it_prints_its_tables(tmp_path, options, printed):
    small = ["--replicas", "2", "--parameters", "20000", "--rounds", "1", "--folder", str(tmp_path)]
    command = [sys.executable, str(BENCH), *small, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(each in done.stdout for each in printed)


def test_a_replica_of_one_process_is_measured_beside_those_of_several(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCH.parent)
    monkeypatch.setenv("REPLICA_RANK", "0")
    monkeypatch.setenv("REPLICA_WORLD_SIZE", "1")
    for name in ("processes", "worker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    processes = importlib.import_module("processes")
    options = argparse.Namespace(parameters=20_000, syncs=3, store=None)
    try:
        processes.work("plain", tmp_path, options)
    finally:
        for name in ("processes", "worker"):
            sys.modules.pop(name, None)
    measured = json.loads((tmp_path / "result.json").read_text())
    assert len(measured["syncs"]) == 3
    assert min(measured["syncs"]) > 0
