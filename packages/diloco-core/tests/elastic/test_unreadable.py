"""A contribution that is damaged before the others have read it: its author incarnations, and has
no need of the copy.
"""

import logging

import pytest
from damage_lab import Rotten
from simulated import Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic


def flip(part):
    def harm(data):
        first = 8 + int.from_bytes(data[:8], "little")
        at = first + int(part * (len(data) - first))
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return harm


def trained(store, topology, publish_every=1, faults=()):
    training = SimulatedTraining(syncs=5, sizes=(400,), sync_every=2)
    settings = Elastic(
        2,
        grace=5.0,
        topology=topology,
        publish_every=publish_every if topology == "gather" else None,
    )
    return training, simulate(
        training,
        Schedule(3, 3, faults=faults),
        settings,
        store=store,
        most_incarnations=1,
        sync_timeout=100.0,
    )


@pytest.mark.parametrize(
    ("topology", "publish_every", "says"),
    [
        (
            "sharded",
            1,
            "Leaving the shards that need it to the other replicas, and waiting for them for 10 s",
        ),
        ("gather", 1, "before its time, because another replica has asked for it"),
        ("gather", 4, "before its time, because another replica has asked for it"),
    ],
)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])  # of the file: each shard has its section
def test_its_author_does_what_the_others_cannot(topology, publish_every, says, part, caplog):
    store = Rotten("deltas/", 4, flip(part))
    with caplog.at_level(logging.ERROR):
        training, outcome = trained(store, topology, publish_every)
    assert store.harmed
    assert outcome.errors() == {}
    assert violations(outcome, training) == []
    author = int(store.harmed.split("/")[2][:5])
    assert says in caplog.text or (
        topology == "sharded" and int(3 * part) == author
    )  # nobody else reads that one


@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_where_the_author_has_died_the_others_name_it_soon(topology, apart):
    """Within some graces, and not after the whole ``sync_timeout``."""
    errors = {}
    for operation in range(
        40, 80, apart
    ):  # killed somewhere in the sync; a few of these are the ones
        store = Rotten("deltas/", 4, flip(0.1))
        _, outcome = trained(
            store, topology, faults=[Fault(rank, 1, operation, "kill before") for rank in (0, 1)]
        )
        errors |= {
            key: (error, outcome.seconds)
            for key, error in outcome.errors().items()
            if isinstance(error, CorruptedObjectError) and "deltas/" in str(error)
        }
    assert errors
    assert max(seconds for _, seconds in errors.values()) < 100.0
