"""The example in the README is run as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_lab import PATIENCE

from diloco_local import LocalProcessExecutor

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.processes
def test_the_example(tmp_path, nothing_survives):
    blocks = re.findall(
        r"```python\n# (\S+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["train_here.py", "launch.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "launch.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),  # noqa: PTH100
        },
    )
    steps = "step 0\nstep 1\nstep 2\n"
    assert done.stdout == steps + "0 succeeded {'steps': 3}\n1 succeeded {'steps': 3}\n"
    assert done.stderr == ""


@pytest.mark.processes
def test_every_variable_that_is_set_is_named(tmp_path, nothing_survives):
    (tmp_path / "all_of_them.py").write_text("import os\ndef told(**_): return dict(os.environ)\n")
    folders = [tmp_path, *filter(None, sys.path)]
    with LocalProcessExecutor(
        root=tmp_path / "root", inherit_env=False, pythonpath=folders
    ) as executor:
        place = {"rendezvous_uri": str(tmp_path / "meet")}
        handles = executor.launch_replicas(1, "all_of_them:told", place, timeout=PATIENCE)
        (result,) = executor.collect(handles)
    text = README.read_text(encoding="utf-8")
    assert [name for name in result["result"] if f"`{name}" not in text] == []
