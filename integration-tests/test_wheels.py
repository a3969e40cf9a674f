"""Each built wheel works alone in a fresh environment, without the others' dependencies."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
DIST = TOP / "dist"
SDKS = {"boto3", "kubernetes", "modal"}
NUMERIC = {"torch", "fsspec", "numpy"}
REQUIRED = {
    path.parent.name: set(
        re.findall(
            r"^[A-Za-z0-9-]+",
            "\n".join(tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]),
            re.MULTILINE,
        )
    )
    for path in sorted(TOP.glob("packages/*/pyproject.toml"))
}


@pytest.mark.wheels
@pytest.mark.parametrize("package", REQUIRED)
def test_a_wheel_alone(package, tmp_path):
    module = package.replace("-", "_")
    absent = (SDKS | NUMERIC) - REQUIRED[package]
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")

    def run(*command):
        return subprocess.run(
            [python, *command], check=True, capture_output=True, text=True, cwd=tmp_path
        ).stdout

    run(
        "-m",
        "pip",
        "install",
        "-q",
        "--find-links",
        str(DIST),
        "-c",
        str(TOP / "tools" / "constraints.txt"),
        package,
    )
    run("-m", "pip", "check")
    installed = {
        entry["name"].lower() for entry in json.loads(run("-m", "pip", "list", "--format", "json"))
    }
    assert {name for name in installed if name.startswith("diloco")} <= {package, "diloco-protocol"}
    assert not installed & absent
    loaded = run("-c", f"import sys, {module}; print(*sys.modules)").split()
    assert not {name.partition(".")[0] for name in loaded} & (SDKS | absent)
    assert Path(run("-c", f"import {module}; print({module}.__file__)").strip()).is_relative_to(
        tmp_path
    )


@pytest.mark.wheels
def test_the_wheels_are_there():
    names = {path.name.partition("-")[0] for path in DIST.glob("*.whl")}
    assert names == {package.replace("-", "_") for package in REQUIRED}, (
        f"run `hatch run wheels` ({sys.executable})"
    )


@pytest.mark.wheels
def test_the_oldest_pytest_that_is_allowed_takes_our_configuration(tmp_path):
    requirements = [
        *re.findall(r'"(pytest>=[^"]*)"', (TOP / "hatch.toml").read_text()),
        *(
            requirement
            for file in TOP.glob("packages/*/pyproject.toml")
            for requirement in tomllib.loads(file.read_text())["project"]["dependencies"]
            if requirement.startswith("pytest")
        ),
    ]
    floors = {requirement.partition(">=")[2].partition(",")[0] for requirement in requirements}
    assert len(floors) == 1, f"one floor for all: {requirements}"
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    wanted = [f"pytest=={floors.pop()}", "hypothesis", TOP / "packages" / "diloco-protocol"]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    tests = "packages/diloco-protocol/tests/test_json.py"
    subprocess.run(
        [python, "-m", "pytest", "-q", tests],
        check=True,
        cwd=TOP,
    )


@pytest.mark.wheels
def test_the_readme_installs_what_it_uses(tmp_path):
    """Its command is run as written, in a clone that has nothing else, and then its launcher."""
    clone = tmp_path / "diloco"
    subprocess.run(["git", "clone", "-q", TOP, clone], check=True)
    readme = (clone / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    (command,) = (block for block in blocks if "diloco-local" in block)
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        "PIP_CONSTRAINT": (TOP / "tools" / "constraints.txt").as_uri(),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    subprocess.run(command, shell=True, check=True, cwd=clone, env=environment)
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", readme, re.DOTALL):
        (clone / name).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [".venv/bin/python", "launch.py"],
        check=True,
        capture_output=True,
        text=True,
        cwd=clone,
        env=environment,
    )
    assert done.stdout.count("succeeded") == 2
