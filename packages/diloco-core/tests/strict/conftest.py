"""What the tests of strict runs share."""

import pytest
from strict_lab import Run


@pytest.fixture
def stopped():
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2)
    run.live(until=3)
    return run
