"""The README's code runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from integration_lab import PATIENCE

README = Path(__file__).parents[1] / "README.md"


def python_blocks():
    """The README's Python files, by the name in their first line."""
    blocks = re.findall(
        r"```python\n# (\S+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    return dict(blocks)


@pytest.mark.processes
def test_the_trainer_and_its_launcher_which_can_be_started_again(tmp_path):
    blocks = python_blocks()
    assert sorted(blocks) == ["launch.py", "my_trainer.py"]
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}

    def launched(*arguments):
        done = subprocess.run(
            [sys.executable, "launch.py", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *log, first, second = done.stdout.splitlines()
        log = [line for line in log if not line.startswith("starting run-")]
        assert [first.split()[:2], second.split()[:2]] == [["0", "succeeded"], ["1", "succeeded"]]
        if not arguments:  # who comes back sees the log of the last minute
            assert sum("rank 0: outer step" in line for line in log) == 5, "one line for each sync"
            assert "joined the run" in log[0]
            assert "done" in log[-1]

    launched()
    (run,) = (tmp_path / "diloco-runs").iterdir()
    launched(run.name)  # comes back to it
    launched()
    assert len([*(tmp_path / "diloco-runs").iterdir()]) == 2
    launched(run.name, "--end")  # has ended already, and stays as it is


def test_the_two_commands_are_each_one_line():
    commands = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [command.count("\n") for command in commands[:2]] == [1, 1]
    assert commands[0].endswith("hatch run demo\n")
    assert commands[1].endswith("hatch run test\n")
