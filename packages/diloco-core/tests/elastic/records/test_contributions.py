"""The file of a contribution is read under its own key only."""

from dataclasses import replace

import pytest
from simulated import SimulatedStore, SimulatedTraining, once, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._records._keys import Delta


class Moved(SimulatedStore):
    """The contribution of rank 1 to sync 2 lies under another key, which says something else."""

    def __init__(self, change):
        super().__init__()
        self.change, self.key = change, None

    def write(self, key, data):
        made = Delta.parse(key)
        if made is not None and (made.sync, made.rank) == (2, 1):
            self.key = key = replace(made, **self.change).key
        super().write(key, data)


@pytest.mark.parametrize(
    "change", [{}, {"epoch": 9}, {"stop": 9}, {"tokens": 99}, {"rate": 16 * "1"}], ids=str
)
def test_under_another_key_it_is_refused(change):
    training, store = SimulatedTraining(4, (640,), clip=True, weight="tokens"), Moved(change)
    settings = Elastic(3, grace=5.0, topology="sharded")
    outcome = once(training, 4, settings, store=store, limit=2000.0)
    errors = outcome.errors().values()
    if not change:
        assert violations(outcome, training) == []
        return
    assert any(isinstance(error, CorruptedObjectError) for error in errors), errors
    assert any("section norms" in str(error) and store.key in str(error) for error in errors)
    assert not any(sync > 1 for sync in training.states)
