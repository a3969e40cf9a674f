"""An entrypoint that starts the processes of its replica itself."""

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from failing_process import fails
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from diloco_core import ConfigurationError, ProcessFailedError
from diloco_core._processes._start import _call, ended_by, number_of_processes, run_processes
from diloco_protocol import DilocoError

TRAINER = """
import os
import sys

import torch

from diloco_core import DiLoCo, connect


def train():
    exchange = connect()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with DiLoCo(model, optimizer, exchange, sync_every=2) as outer:
        for step in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("a line of", exchange.process)
    torch.distributed.destroy_process_group()
    return [exchange.process, exchange.processes, outer.committed]
"""


FAILING = """
import os
import time


def train():
    if os.environ["RANK"] == "1":
        raise ArithmeticError("a bad batch")
    time.sleep(600)
"""


def started(folder, trainer):
    """Run the entrypoint as somebody types it."""
    (folder / "trainer.py").write_text(trainer)
    command = [sys.executable, "-m", "diloco_core.replica_entrypoint", "--processes", "2"]
    command += ["--rank", "0", "--world-size", "1", "--rendezvous", "store"]
    return subprocess.run(
        [*command, "--trainer-module", "trainer"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.processes
def test_it_returns_what_the_first_process_returns(tmp_path):
    done = started(tmp_path, TRAINER)
    assert done.returncode == 0, done.stderr
    *lines, result = done.stdout.splitlines()
    assert json.loads(result) == [0, 2, 2]
    assert sorted(lines) == ["[process0]:a line of 0", "[process1]:a line of 1"]
    assert "[process0]:" in done.stderr, "the log has the number of the process in front"


@pytest.mark.slow
@pytest.mark.processes
def test_it_fails_as_the_first_process_that_fails(tmp_path):
    done = started(tmp_path, FAILING)
    assert done.returncode == 1
    assert "ProcessFailedError: process 1 of this replica (pid " in done.stderr
    assert "ArithmeticError: a bad batch" in done.stderr
    # That of the command and that of the process; torch shows none of its own.
    assert done.stderr.count("Traceback (most recent call last)") == 2
    assert 'trainer.py", line 8, in train' in done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_process_that_returns_or_exits_early_leaves_the_groups_of_torch(
    tmp_path, monkeypatch, code
):
    monkeypatch.setenv("RANK", "0")
    options = {"init_method": f"file://{tmp_path}/meeting", "rank": 0, "world_size": 1}

    def trainer():
        torch.distributed.init_process_group("gloo", **options)
        sys.exit(code)

    if code:
        with pytest.raises(SystemExit):
            _call(trainer, {})
        torch.distributed.destroy_process_group()
    else:
        assert _call(trainer, {}) is None
        assert not torch.distributed.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for threads in /proc")
def test_no_thread_of_gloo_lives_when_a_trainer_has_returned(tmp_path, monkeypatch):
    """It could abort the process at its end; see _call."""
    monkeypatch.setenv("RANK", "0")
    options = {"init_method": f"file://{tmp_path}/meeting", "rank": 0, "world_size": 1}

    def threads():
        names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
        return [name for name in names if "gloo" in name]

    def trainer():
        torch.distributed.init_process_group("gloo", **options)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model.itself = [model]  # as the objects of a trainer refer to each other
        assert threads()

    before = len(threads())
    _call(trainer, {})
    assert len(threads()) == before


@pytest.mark.parametrize(
    ("exit_code", "report", "words"),
    [
        (1, {"message": "ValueError: x"}, ": ValueError: x"),
        (-signal.SIGKILL, None, ": it was ended by SIGKILL"),
        (3, None, ": it exited with code 3"),
    ],
)
def test_how_a_process_has_ended_is_said(tmp_path, exit_code, report, words):
    file = tmp_path / "error.json"
    if report:
        report["extraInfo"] = {"py_callstack": "Traceback…", "timestamp": "1"}
        file.write_text(json.dumps({"message": report}))
    error = ended_by(1, ProcessFailure(1, 77, exit_code, str(file)))
    assert isinstance(error, ProcessFailedError)
    assert str(error) == f"process 1 of this replica (pid 77){words}"
    assert (error.process, error.exit_code) == (1, exit_code)
    assert not error.final
    assert getattr(error, "__notes__", []) == (["Traceback…"] if report else [])


@pytest.mark.slow
@pytest.mark.processes
def test_an_error_that_would_come_again_is_final_for_the_replica_as_well():
    with pytest.raises(ProcessFailedError, match="ReplicaLostError: the run has ended") as raised:
        run_processes(2, fails, {"kind": "ReplicaLostError", "final": True})
    assert raised.value.final


@pytest.mark.parametrize("kind", ["ReplicaLostError", "ConfigurationError"])
def test_whether_an_error_is_final_is_in_its_traceback(tmp_path, kind):
    with pytest.raises(DilocoError) as raised:
        _call(fails, {"kind": kind, "final": False})
    trace = "".join(traceback.format_exception(raised.value))
    report = {"message": f"{kind}: the run", "extraInfo": {"py_callstack": trace, "timestamp": "1"}}
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": report}))
    assert ended_by(1, ProcessFailure(1, 77, 1, str(file))).final == (kind == "ConfigurationError")


@pytest.mark.parametrize("exit_code", [143, -signal.SIGTERM])
def test_a_process_that_was_told_to_end_ends_the_replica_likewise(exit_code):
    error = ended_by(0, ProcessFailure(0, 77, exit_code, "none"))
    assert (type(error), error.code) == (SystemExit, 143)


@pytest.mark.parametrize("asked", [0, -1, 1.5, True, "all", None])
def test_a_number_that_is_none_is_refused(asked):
    with pytest.raises(ConfigurationError, match="processes must be a number from 1 on, or 'gpu'"):
        number_of_processes(asked, {})


def test_processes_for_gpus_are_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match="this machine shows none"):
        number_of_processes("gpu", {})
    for number in (1, 8):
        monkeypatch.setattr("torch.cuda.device_count", lambda number=number: number)
        assert number_of_processes("gpu", {}) == number


def test_processes_inside_processes_are_refused():
    assert number_of_processes(1, {"LOCAL_WORLD_SIZE": "2"}) == 0
    with pytest.raises(ConfigurationError, match="inside one that torchrun has started"):
        number_of_processes(2, {"LOCAL_WORLD_SIZE": "2"})
