"""Put on the path what several test files share: the modules in ``labs``, and the simulator."""

import inspect
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "labs"))

import training_lab
from fsspec.implementations.memory import MemoryFileSystem

from diloco_core import Timing


@pytest.fixture(scope="session")
def lab():
    """The module ``training_lab``: how replicas are run, filled, pushed and compared."""
    return training_lab


@pytest.fixture(autouse=True, scope="module")
def nothing_waits_for_the_disk():
    """No test cuts the power, and a hundred thousand waits for the disk take minutes.

    A file that is not open is refused all the same. Processes that tests start do wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch):
    """A rank that has failed is not started again in most tests, so nobody waits for it."""
    defaults = list(Timing.__init__.__defaults__)
    defaults[list(inspect.signature(Timing).parameters).index("return_within")] = 0.0
    monkeypatch.setattr(Timing.__init__, "__defaults__", tuple(defaults))


@pytest.fixture(autouse=True)
def empty_memory():
    """``memory://`` is one store of the whole process; what earlier tests left slows it down."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def environ(tmp_path):
    """Return what a launcher tells a replica."""
    return {
        "RENDEZVOUS_URI": str(tmp_path / "run"),
        "REPLICA_RANK": "1",
        "REPLICA_WORLD_SIZE": "4",
        "DILOCO_RUN_ID": "monday",
    }
