"""The README's code runs as it stands."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration_lab import PATIENCE

from diloco_local import LocalProcessExecutor

README = Path(__file__).parents[1] / "README.md"


def python_blocks():
    """The README's Python files, by the name in their first line."""
    blocks = re.findall(
        r"```python\n# (\S+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    return dict(blocks)


@pytest.fixture
def start(tmp_path):
    """Start README's launcher, in a folder with README's two files."""
    blocks = python_blocks()
    assert sorted(blocks) == ["launch.py", "my_trainer.py"]
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    unbuffered = {"PYTHONUNBUFFERED": "1", "XDG_STATE_HOME": str(tmp_path / "state")}

    def start(*arguments):
        return subprocess.Popen(
            [sys.executable, "launch.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, **unbuffered},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield start
    with LocalProcessExecutor(root=tmp_path / "state" / "diloco") as executor:
        for run_id in executor.list_runs():  # where the test has failed
            executor.cancel_run(run_id)


def change(folder, before, after):
    """Change one place in the launcher."""
    launcher = folder / "launch.py"
    first, rest = launcher.read_text().split(before)
    launcher.write_text(first + after + rest)


@pytest.mark.processes
def test_the_trainer_and_its_launcher_which_can_be_started_again(tmp_path, start):
    def launched(*arguments, says=""):
        launcher = start(*arguments)
        out, errors = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 0, errors
        *log, first, second = out.splitlines()
        log = [line for line in log if not line.startswith("starting run-")]
        assert [first.split()[:2], second.split()[:2]] == [["0", "succeeded"], ["1", "succeeded"]]
        if not arguments:  # who comes back sees the log of the last minute
            assert sum("rank 0: outer step" in line for line in log) == 5, "one line for each sync"
            assert "joined the run" in "".join(log[:2])
            assert "done" in log[-1]
            assert says in out

    launched()
    (run,) = (tmp_path / "diloco-runs").iterdir()
    launched(run.name)  # comes back to it
    launched(run.name, "--end")  # has ended already, and stays as it is
    # Another launch is another run, which may go on where the first one has ended.
    change(tmp_path, 'f"diloco-runs/{run_id}"', f'"diloco-runs/{run.name}"')
    change(tmp_path, '"steps": 100}', '"steps": 200}, "connect_options": {"resume": True}')
    launched(says="goes on from outer step 5, and from inner step 100")
    with LocalProcessExecutor(root=tmp_path / "state" / "diloco") as executor:
        assert len(executor.list_runs()) == 2


@pytest.mark.processes
def test_ctrl_c_says_what_has_become_of_the_run(tmp_path, start):
    launcher = start()
    started = launcher.stdout.readline().split()
    launcher.send_signal(signal.SIGINT)
    out, errors = launcher.communicate(timeout=PATIENCE)
    assert (out, errors) == ("", f"{started[1]} was not started yet: nothing is left running.\n")
    assert launcher.returncode == 1

    change(tmp_path, '"steps": 100}', '"steps": 10**9}')
    launcher = start()
    run = launcher.stdout.readline().split()[1]
    assert any("joined the run" in launcher.stdout.readline() for _ in range(2))
    launcher.send_signal(signal.SIGINT)
    out, errors = launcher.communicate(timeout=PATIENCE)
    assert f"launch.py {run} --end" in out
    assert (launcher.returncode, errors) == (0, "")
    ended = start(run, "--end")
    out, errors = ended.communicate(timeout=PATIENCE)
    assert (ended.returncode, errors) == (0, "")
    assert out.endswith("0 cancelled cancelled on request\n1 cancelled cancelled on request\n")


SLEEPER = """
import os
import time


def sleep(**_):
    print("process", os.getpid(), flush=True)
    time.sleep(3600)
"""


@pytest.mark.processes
def test_the_launcher_warns_of_a_replica_that_is_killed_for_good(tmp_path, start):
    (tmp_path / "sleeper.py").write_text(SLEEPER)  # starts at once, since it imports no torch
    change(tmp_path, "diloco_core.replica_entrypoint:run", "sleeper:sleep")
    change(tmp_path, "max_restarts=2", "max_restarts=0")
    launcher = start()
    run = launcher.stdout.readline().split()[1]
    assert launcher.stdout.readline().startswith("process ")
    with LocalProcessExecutor(root=tmp_path / "state" / "diloco") as executor:
        lines = executor.log_iter(executor.attach(run)[1], follow=True, regex=r"^process")
        os.kill(int(next(lines).split()[1]), signal.SIGKILL)
        assert f"rank 1 of run '{run}' has failed for good: " in launcher.stderr.readline()
        executor.cancel_run(run)  # the other still sleeps
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert "\n0 cancelled " in out
    assert "\n1 failed " in out


def test_the_two_commands_are_each_one_line():
    commands = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [command.count("\n") for command in commands[:2]] == [1, 1]
    assert commands[0].endswith("hatch run demo\n")
    assert commands[1].endswith("hatch run test\n")
