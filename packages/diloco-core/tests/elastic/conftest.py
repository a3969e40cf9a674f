"""Share what all tests of elastic runs need."""

import pytest

from diloco_core import Elastic
from diloco_core._run._sync._compute import Computation


@pytest.fixture
def rounds_otherwise(monkeypatch):
    """Makes a rank compute other values where ``when(epoch, sync)`` is true."""

    def spoil(rank, when):
        update = Computation._update

        def other(self, batch, inputs):
            update(self, batch, inputs)
            is_chosen = self._incarnation.rank == rank and 0 in batch
            if is_chosen and when(self._incarnation.epoch, self._commit.sync):
                self._job.copy[0][3] += 2**-10

        monkeypatch.setattr(Computation, "_update", other)

    return spoil


@pytest.fixture(params=["sharded", "gather"])
def publishing(request):
    """Makes settings of both topologies, in which each state is published."""

    def make(min_replicas, **options):
        every = 1 if request.param == "gather" else None
        return Elastic(
            min_replicas, **{"topology": request.param, "publish_every": every, **options}
        )

    return make
