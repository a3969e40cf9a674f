"""The public names, and what they bring along."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import diloco_localcloud


def test_all_is_sorted_and_complete():
    names = {name for name, value in vars(diloco_localcloud).items() if not name.startswith("_")}
    modules = {name for name in names if type(getattr(diloco_localcloud, name)) is type(sys)}
    assert set(diloco_localcloud.__all__) - {"__version__"} == names - modules
    assert diloco_localcloud.__all__ == sorted(diloco_localcloud.__all__)
    assert (
        diloco_localcloud.__version__
        == importlib.import_module("diloco_localcloud.__about__").__version__
    )


@pytest.mark.parametrize("name", diloco_localcloud.__all__)
def test_public_names_are_documented(name):
    assert (getattr(diloco_localcloud, name).__doc__ or "").strip()


def test_it_needs_websockets_and_nothing_else():
    code = "import sys, diloco_localcloud; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert (
        not {name for name in loaded if not name.startswith("_")}
        - sys.stdlib_module_names
        - {"diloco_localcloud", "sitecustomize", "websockets"}
    )
