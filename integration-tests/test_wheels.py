"""Each built wheel works alone in a fresh environment, and brings none of the others' dependencies."""

import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
DIST = TOP / "dist"
FORBIDDEN = {"boto3", "kubernetes", "modal"}
OWN = {"diloco-eks": {"kubernetes"}}
PACKAGES = {
    "diloco-protocol": ("diloco_protocol", {"torch", "fsspec", "numpy"}),
    "diloco-conformance": ("diloco_conformance", {"torch", "fsspec", "numpy"}),
    "diloco-local": ("diloco_local", {"torch", "fsspec", "numpy"}),
    "diloco-eks": ("diloco_eks", {"torch", "fsspec", "numpy"}),
    "diloco-localcloud": ("diloco_localcloud", {"torch", "fsspec", "numpy"}),
    "diloco-core": ("diloco_core", set()),
}


@pytest.mark.wheels
@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_alone(package, tmp_path):
    module, absent = PACKAGES[package]
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
    foreign = FORBIDDEN - OWN.get(package, set())
    assert not installed & (foreign | absent)
    loaded = run("-c", f"import sys, {module}; print(*sys.modules)").split()
    assert not {name.partition(".")[0] for name in loaded} & (FORBIDDEN | absent)
    assert Path(run("-c", f"import {module}; print({module}.__file__)").strip()).is_relative_to(
        tmp_path
    )


@pytest.mark.wheels
def test_the_wheels_are_there():
    names = {path.name.partition("-")[0] for path in DIST.glob("*.whl")}
    assert names == {module for module, _ in PACKAGES.values()}, (
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
        [python, "-m", "pytest", "-c", "tools/pytest.toml", "--rootdir", ".", "-q", tests],
        check=True,
        cwd=TOP,
    )
