"""The folder of the tests is on the path, for the modules that several of them share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import training_lab


@pytest.fixture(scope="session")
def lab():
    """What replicas are run, filled, pushed, compared and brought into trouble with: the module ``training_lab``."""
    return training_lab
