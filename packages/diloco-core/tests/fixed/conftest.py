"""Hold what all tests of fixed membership have in common."""

import pytest
from simulated import SimulatedStore
from strict_lab import STORES, Overwriting
from training_lab import Clock

from diloco_core import StoreExchange, Timing


@pytest.fixture(params=[SimulatedStore, Overwriting], ids=["deciding", "overwriting"])
def new_store(request):
    """Makes stores in which fixed runs behave the same: those that can decide, or cannot."""
    return request.param


@pytest.fixture(params=STORES.values(), ids=STORES)
def exchanges_in(request):
    """Makes exchanges over one folder, in a store that can decide and in one that cannot.

    Nobody waits for a rank to return.

    With ``limits``, each set of them has a clock of its own.
    """

    def make(folder, world_size, ranks=None, run_id="", **limits):
        clock = Clock()
        if limits:
            limits.update(clock=clock, sleep=clock.sleep)
        timing = Timing(**{"return_within": 0.0, **limits})
        return [
            StoreExchange(
                request.param(str(folder / "run")), rank, world_size, run_id=run_id, timing=timing
            )
            for rank in (range(world_size) if ranks is None else ranks)
        ]

    return make
