"""Where a run is, and where its model is written."""

import pytest


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def model(tmp_path):
    return tmp_path / "model"
