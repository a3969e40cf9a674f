"""Fixed runs that begin with a loaded outer loop go on as if they had not stopped."""

import pytest
from resuming_lab import OUTER, REPLICAS, Experiment, equal

from diloco_core import in_process
from diloco_core._run._exchange import StoreExchange
from diloco_core._store._open import open_store


def folder(path):
    return [StoreExchange(open_store(str(path)), rank, REPLICAS) for rank in range(REPLICAS)]


@pytest.mark.parametrize("outer", ["Nesterov", "Adam"])
@pytest.mark.parametrize("stop", [1, 4, 6, 9])
def test_over_a_store_it_goes_on_at_a_new_prefix(lab, outer, stop, tmp_path):
    experiment = Experiment(lab, **OUTER[outer])
    wanted = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(stop), folder(tmp_path / "first"))
    again = lab.run(experiment.since(saved, stop), folder(tmp_path / "second"))
    assert all(map(equal, again, wanted))
