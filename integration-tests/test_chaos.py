"""Real replicas are killed, stopped and cut off; an outsider reads in the store what came of it."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.processes

CHAOS = Path(__file__).parents[1] / "tools/chaos"


BOTH = pytest.mark.parametrize(
    "membership", [[], ["--elastic"]], ids=["fixed membership", "elastic membership"]
)
CHECKED = ("steps recomputed", "values", "ledgers of contributions", "states of replicas", "starts")


def chaos(folder, *arguments):
    """One disturbed run; what it says."""
    command = [sys.executable, str(CHAOS / "run.py"), *arguments, "--keep", str(folder / "kept")]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["violations"] == []
    assert done.returncode == 0
    assert result["ends"]["errors"] == {}
    checks = result["checks"]
    for what in CHECKED:
        assert checks[what] > 0, checks
    return result


@pytest.fixture
def read(monkeypatch):
    """What the reader says of a run that was kept."""
    monkeypatch.syspath_prepend(CHAOS)
    names = ("reader", "fixed", "objects", "arithmetic", "findings", "ledgers", "records")
    reader, fixed, objects, *_ = map(importlib.import_module, names)

    def say(folder):
        own = objects.Objects(folder / "store", folder / "history")
        left = folder / "contributions"
        outsider = fixed.FixedReader(own, left) if left.exists() else reader.Reader(own)
        outsider.read()
        return " ".join(outsider.findings.violations)

    yield say
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("metadata", [{}, {"without": "1.0001"}])
@pytest.mark.parametrize("removed", [False, True])
def test_what_is_written_again_must_be_the_same(tmp_path, monkeypatch, metadata, removed):
    """Except for a shard without an own part, once it was deleted."""
    monkeypatch.syspath_prepend(CHAOS)
    history = importlib.import_module("history").History(tmp_path, 1)
    key = "state/00000004/000.00001.safetensors"
    for own in ({}, metadata | {"other": "x"}):
        header = json.dumps({"__metadata__": own}).encode()
        history.wrote(key, len(header).to_bytes(8, "little") + header)
        if removed:
            history.wrote("state/00000005/000.done.json", b"{}")
            history.removed(key)
    complaints = " ".join(history.violations)
    assert ("with another content" not in complaints) == bool(removed and metadata)
    for name in ("history", "objects"):
        del sys.modules[name]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("delay", "fragments", "longest"), [("4", "1", 3), ("2", "2", 1), ("-1", "1", 3)]
)
def test_a_delay_that_no_fragment_can_have_is_refused(tmp_path, delay, fragments, longest):
    """Before anything is started."""
    command = [sys.executable, str(CHAOS / "run.py"), "--keep", str(tmp_path / "kept")]
    command += [f"--delay={delay}", "--fragments", fragments, "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--delay must be between 0 and {longest}: " in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_short_run_over_a_faulty_s3(tmp_path):
    result = chaos(
        tmp_path,
        "--elastic",
        "--store",
        "obstore+s3",
        "--seconds",
        "2",
        "--faults",
        "1",
        "--averaging",
    )
    assert sum(result["faults"].values()) > 0
    assert result["checks"]["global ledgers"] > 0
    assert result["checks"].get("steps not recomputed", 0) == 0


@pytest.mark.slow
@BOTH
def test_a_short_run_that_overlaps_and_sends_int8(tmp_path, read, membership):
    """The reader decodes what was sent, and recomputes every step from it."""
    result = chaos(
        tmp_path,
        *membership,
        "--seconds",
        "2",
        "--kill-every",
        "2",
        "--delay",
        "2",
        "--codec",
        "int8",
    )
    assert result["trouble"]["kills"] >= 1
    assert result["dropped"] > 0  # the steps whose place a late result has taken
    kept = tmp_path / "kept"
    assert read(kept) == ""
    shift(newest_shard(kept))
    assert "as rounding explains" in read(kept)


@pytest.mark.slow
@BOTH
def test_a_short_run_that_publishes_int8(tmp_path, read, membership):
    """The reader adds up what was published, and compares it with whole states and its steps."""
    result = chaos(
        tmp_path,
        *membership,
        *("--seconds", "2", "--kill-every", "2", "--codec", "int8", "--state-codec", "int8"),
    )
    assert result["checks"]["whole states"] > 0
    kept = tmp_path / "kept"
    assert read(kept) == ""
    newest = newest_shard(kept)
    whole = newest.read_bytes()
    change(newest, "update.0")
    assert "as rounding explains" in read(kept)
    newest.write_bytes(whole)
    change(newest, "outer.momentum_buffer.0")
    assert "the momentum of" in read(kept)
    newest.write_bytes(whole)
    change(min((kept / "history/state").rglob("*.safetensors")), "update.0")
    assert "is not the state before it and the update" in read(kept)


@pytest.mark.parametrize(
    "membership",
    [
        pytest.param([], id="fixed membership", marks=pytest.mark.slow),
        pytest.param(["--elastic"], id="elastic membership"),
    ],
)
def test_a_short_run_with_a_zombie_and_a_reader_that_sees_damage(tmp_path, read, membership):
    trouble = ("--seconds", "2", "--stop-every", "2", "--grace", "0.4", "--kill-every", "3")
    result = chaos(tmp_path, *membership, *trouble)
    assert result["trouble"]["second incarnations"] >= 1
    assert result["trouble"]["kills"] >= 1
    kept = tmp_path / "kept"
    assert read(kept) == ""
    *_, newest = sorted((kept / "store/commits").iterdir())
    for damage, sentence in (
        (
            lambda copy: (copy / "store/commits" / newest.name).with_name("00000003.json").unlink(),
            "00000003.json is missing",
        ),
        (lambda copy: shutil.copy(newest, copy / "store/commits/00000003.json"), "00000003.json"),
        (lambda copy: shift(newest_shard(copy)), "as rounding explains"),
        (
            lambda copy: newest_shard(copy, "store").unlink(),
            "is missing, and it belongs to the newest state",
        ),
    ):
        copy = tmp_path / "copy"
        shutil.copytree(kept, copy)
        damage(copy)
        assert sentence in read(copy)
        shutil.rmtree(copy)


@pytest.mark.slow
def test_what_replicas_send_with_fixed_membership_is_a_part_of_what_they_contribute(tmp_path, read):
    result = chaos(
        tmp_path,
        *("--seconds", "1", "--stop-every", "1", "--grace", "0.2", "--replicas", "2"),
    )
    assert result["trouble"]["stops"] >= 1
    assert result["checks"]["sent contributions"] > 0
    kept = tmp_path / "kept"
    assert read(kept) == ""
    for path, sentence in (
        (newest_shard(kept), "as rounding explains"),
        (max((kept / "history/deltas").rglob("*.safetensors")), "than was contributed"),
        (max((kept / "contributions").iterdir()), "as rounding explains"),
    ):
        whole = path.read_bytes()
        shift(path)
        assert sentence in read(kept)
        path.write_bytes(whole)


def newest_shard(kept, where="history"):
    return max((kept / where / "state").rglob("*.safetensors"))


def shift(path):
    """Another value in a shard, a little off."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(
        name for name in header if name != "__metadata__" and header[name]["dtype"] == "F32"
    )
    start = 8 + size + header[name]["data_offsets"][0]
    value = np.frombuffer(data[start : start + 4], np.float32)[0]
    data[start : start + 4] = np.float32(value + 0.001).tobytes()
    path.write_bytes(data)


def change(path, name):
    """Another value, in the first block of an encoded tensor of a shard."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start = 8 + size + json.loads(data[8 : 8 + size])[name]["data_offsets"][0]
    first = data[start + 4]  # after the scale of the block
    data[start + 4] = first ^ 0x40
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["--kill-every", "4", "--averaging", "--step-seconds", "0.005"], id="fixed-killed"
        ),
        pytest.param(
            ["--stop-every", "4", "--kill-every", "15", "--grace", "0.6", "--fragments", "2"],
            id="fixed-stopped",
        ),
        pytest.param(
            ["--store", "obstore+s3", "--faults", "1", "--kill-every", "8", "--stop-every", "15"],
            id="fixed-obstore",
        ),
        pytest.param(
            [
                *("--store", "fsspec+s3", "--faults", "1", "--kill-every", "10"),
                *("--fragments", "2", "--delay", "1", "--codec", "int8", "--state-codec", "int8"),
            ],
            id="fixed-s3fs",
        ),
        pytest.param(["--elastic", "--kill-every", "4", "--damage-every", "15"], id="killed"),
        pytest.param(
            [
                *("--elastic", "--topology", "gather"),
                *("--kill-every", "6", "--damage-every", "12"),
            ],
            id="gather",
        ),
        pytest.param(
            [
                *("--elastic", "--stop-every", "4", "--kill-every", "30"),
                *("--grace", "0.6", "--fragments", "2"),
            ],
            id="stopped",
        ),
        pytest.param(
            [
                *("--elastic", "--store", "obstore+s3", "--faults", "1"),
                *("--kill-every", "15", "--stop-every", "15"),
            ],
            id="obstore",
        ),
        pytest.param(
            [
                "--elastic",
                *(
                    "--store",
                    "obstore+s3",
                    "--faults",
                    "1",
                    "--kill-every",
                    "6",
                    "--stop-every",
                    "15",
                ),
                *("--fragments", "2", "--delay", "1", "--codec", "int8"),
                *("--state-codec", "int8", "--seconds", "180"),
            ],
            id="streaming",
        ),
        pytest.param(
            [
                *("--elastic", "--store", "fsspec+s3", "--faults", "1"),
                *("--kill-every", "20", "--averaging"),
            ],
            id="s3fs",
        ),
    ],
)
def test_minutes_of_trouble(tmp_path, arguments):
    result = chaos(tmp_path, "--seconds", "100", *arguments)
    assert result["syncs"] > 10
    assert result["accuracy"] > 0.4  # untrained: 0.1
    assert not list(tmp_path.glob("diloco-chaos-*"))
