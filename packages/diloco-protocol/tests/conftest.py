"""The folder of the tests is on the path, for the modules that several of them share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from memory_lab import Memory


@pytest.fixture
def executor():
    return Memory({})
