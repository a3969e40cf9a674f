"""A run's folder, and the store that is opened on it."""

import pytest

from diloco_core._store._open import open_store


@pytest.fixture
def store(tmp_path):
    opened = open_store(str(tmp_path / "run"))
    yield opened
    opened.close()


@pytest.fixture
def run(tmp_path, store):
    """The run's folder."""
    return tmp_path / "run"
