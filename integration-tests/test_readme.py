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
def test_the_trainer_and_its_launcher(tmp_path):
    blocks = python_blocks()
    assert sorted(blocks) == ["launch.py", "my_trainer.py"]
    assert 'result["error"]' in blocks["launch.py"], (
        "a second run on the same prefix fails, and is to say why"
    )
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "launch.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["0", "succeeded"], ["1", "succeeded"]]
    assert all(float(line.split()[2]) >= 0 for line in lines)


def test_the_two_commands_are_each_one_line():
    commands = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert [command.count("\n") for command in commands[:2]] == [1, 1]
    assert commands[0].endswith("hatch run demo\n")
    assert commands[1].endswith("hatch run test\n")


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (README.parent / target).exists(), target
