"""Provide the places of a run and of its model."""

import pytest


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def model(tmp_path):
    return tmp_path / "model"
