"""What the package shows."""

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


@pytest.mark.processes
def test_modules_that_run_with_m_are_not_imported_by_the_package():
    code = "import sys, diloco_core; print('diloco_core.replica_entrypoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
