"""What all tests of fixed membership have in common."""

import pytest
import torch
from generations_lab import Overwriting

from diloco_core.testing import SimulatedStore


@pytest.fixture(autouse=True)
def one_thread():
    """A simulated replica computes next to nothing. More threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[SimulatedStore, Overwriting], ids=["deciding", "overwriting"])
def new_store(request):
    """Makes stores in which runs with fixed membership behave the same: of those that can decide, and of those that cannot."""
    return request.param
