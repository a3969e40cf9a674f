"""Test what the package shows."""

import subprocess
import sys

import pytest

import diloco_core


def test_all_is_sorted_and_complete():
    names = {name for name, value in vars(diloco_core).items() if not name.startswith("_")}
    modules = {name for name in names if type(getattr(diloco_core, name)) is type(sys)}
    assert set(diloco_core.__all__) == names - modules
    assert diloco_core.__all__ == sorted(diloco_core.__all__)


@pytest.mark.parametrize("name", diloco_core.__all__)
def test_public_names_are_documented(name):
    assert (getattr(diloco_core, name).__doc__ or "").strip()


RUN_BOTH = """
import runpy, sys
for name in "replica_entrypoint", "probe":
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"diloco_core.{name}", run_name="__main__")
    except SystemExit as end:
        assert not end.code
assert "torch.distributed.fsdp" not in sys.modules, "which takes half a second"
"""


@pytest.mark.processes
def test_modules_that_run_with_m_are_there_and_not_imported_by_the_package():
    """Python would warn of one that is imported already."""
    command = [sys.executable, "-W", "error", "-c", RUN_BOTH]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--trainer-module" in done.stdout
    assert "diloco_core.probe" in done.stdout
