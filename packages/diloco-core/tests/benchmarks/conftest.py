"""The harness of ``hatch run bench-proof``, which lies beside the package."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

MODULES = (
    "command", "goals", "losses", "page", "picture", "replica", "results", "rows", "text",
    "throttle", "timing",
)  # fmt: skip


@pytest.fixture(scope="session")
def proof():
    """Its modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        return SimpleNamespace(
            **{name: importlib.import_module(f"proof.{name}") for name in MODULES}
        )


class Time:
    """A clock that only sleeping moves on."""

    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def time():
    return Time()
