"""What all tests of elastic runs have in common."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """A simulated replica computes next to nothing.

    More threads would only wait for one another.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
