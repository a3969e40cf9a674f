"""Each built wheel works alone in a fresh environment, and brings none of the others' dependencies."""

import json
import subprocess
import sys
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
