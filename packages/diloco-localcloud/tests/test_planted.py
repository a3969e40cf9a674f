"""What lies in the folder in which the command is started is not run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diloco_localcloud.__main__ import main

# Of the standard library, of what the package needs, and of what the commands import late.
PLANTED = ("__future__", "argparse", "boto3", "http", "json", "tempfile", "websockets")


def started_in(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def plant(folder, names):
    for name in names:
        (folder / f"{name}.py").write_text("raise SystemExit(f'{__file__} was run')\n")


def is_clean(done):
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: diloco-localcloud")


@pytest.mark.processes
def test_files_in_the_folder_are_not_run(tmp_path):
    (tmp_path / "folder").mkdir()
    plant(
        tmp_path / "folder",
        {*sys.stdlib_module_names, *PLANTED, "diloco_localcloud", "sitecustomize"},
    )
    script = tmp_path / "diloco-localcloud"
    script.write_text("import sys\nfrom diloco_localcloud.__main__ import main\nsys.exit(main())\n")
    is_clean(started_in(tmp_path / "folder", str(script), "--help"))
    is_clean(started_in(tmp_path / "folder", "-P", "-m", "diloco_localcloud", "--help"))


@pytest.mark.processes
def test_files_of_that_name_are_in_nobodys_way(tmp_path):
    """Python's own earlier imports come from the folder, as the advice for users says."""
    plant(tmp_path, PLANTED)
    done = started_in(tmp_path, "-m", "diloco_localcloud", "--help")
    is_clean(done)
    assert "python -P -m diloco_localcloud" in " ".join(done.stdout.split())


@pytest.mark.processes
def test_an_empty_element_of_pythonpath_is_the_folder(tmp_path, monkeypatch):
    """Python itself looks there first, as everybody is told who asks for help."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", *filter(None, sys.path)]))
    told = started_in(tmp_path, "-P", "-m", "diloco_localcloud", "--help")
    is_clean(told)
    assert "if PYTHONPATH names that folder, as an empty element" in " ".join(told.stdout.split())
    plant(tmp_path, ["json"])
    done = started_in(tmp_path, "-P", "-m", "diloco_localcloud", "--help")
    assert "json.py was run" in done.stderr


@pytest.mark.processes
def test_other_commands_keep_their_folder(tmp_path):
    (tmp_path / "mine.py").write_text("import diloco_localcloud, sys; print(sys.path[0])\n")
    assert started_in(tmp_path, "-m", "mine").stdout == f"{tmp_path.resolve()}\n"
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import diloco_localcloud\nimport mine\n")
    (tmp_path / "pack" / "__main__.py").touch()
    assert started_in(tmp_path, "-m", "pack", "diloco_localcloud").returncode == 0


def test_the_console_script_is_the_command():
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["diloco-localcloud"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
