"""The author of what is damaged as it is written does what others cannot."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from damage_lab import Rotten, flip
from simulated import Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._states import _publish

SHARDED = Elastic(2, grace=5.0, topology="sharded")
GATHER = Elastic(2, grace=5.0, topology="gather", publish_every=1)
ASKED = "before its time, because another replica has asked for it"


def late(part):
    """One bit of a file is wrong, after so much of its payload."""

    def harm(data):
        first = 8 + int.from_bytes(data[:8], "little")
        return flip(data, 8 * (first + int(part * (len(data) - first))) + 2)

    return harm


def trained(store, settings, ranks, syncs=5, sizes=(400,), before=None, faults=()):
    """A run whose replicas may not die; what it trained."""
    salts = {} if before is None else dict(before.salts)
    training = SimulatedTraining(syncs, sizes, sync_every=2, salts=salts)
    schedule = Schedule(ranks, 3, faults=faults)
    options = {"most_incarnations": 1, "sync_timeout": 100.0}
    return training, simulate(training, schedule, settings, store=store, **options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (SHARDED, "need it to the other replicas, and waiting for them for 10 s"),
        (GATHER, ASKED),
        (replace(GATHER, publish_every=4), ASKED),
    ],
    ids=["sharded", "gather", "gather seldom"],
)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])  # of the file: each shard has its section
def test_the_author_of_a_contribution_does_what_the_others_cannot(settings, says, part, caplog):
    store = Rotten("deltas/", 4, late(part))
    with caplog.at_level(logging.ERROR):
        training, outcome = trained(store, settings, 3)
    assert store.harmed
    assert violations(outcome, training) == []
    author = int(store.harmed.split("/")[2][:5])
    is_unread = settings is SHARDED and int(3 * part) == author  # nobody else reads that one
    assert says in caplog.text or is_unread


@pytest.mark.sampled
@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [SHARDED, GATHER], ids=["sharded", "gather"])
def test_where_the_author_has_died_the_others_name_it_soon(settings, apart):
    """Within some graces, and not after the whole ``sync_timeout``."""
    seconds = []
    for operation in range(40, 80, apart):  # killed somewhere in the sync; a few are the ones
        faults = [Fault(rank, 1, operation, "kill before") for rank in (0, 1)]
        _, outcome = trained(Rotten("deltas/", 4, late(0.1)), settings, 3, faults=faults)
        seconds += [
            outcome.seconds
            for error in outcome.errors().values()
            if isinstance(error, CorruptedObjectError) and "deltas/" in str(error)
        ]
    assert seconds
    assert max(seconds) < 100.0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "harm", [lambda data: data[:-5], lambda data: b"", late(0.999999)], ids=["cut", "empty", "end"]
)
@pytest.mark.parametrize("which", [2, 10, 11])  # the last ones when the replicas leave
def test_of_a_gathered_state_all_hold_the_values(which, harm, caplog):
    store = Rotten("state/", which, harm)
    with caplog.at_level(logging.ERROR):
        training, outcome = trained(store, GATHER, 2, 6, (40,))
    assert store.harmed
    assert violations(outcome, training) == []
    if store.harmed.startswith("state/00000006/"):
        assert f"writing {store.harmed} again with the same content" in caplog.text
    else:
        assert "No replica will begin from this state; a later one takes its place" in caplog.text
    longer, outcome = trained(store, replace(GATHER, resume=True), 2, 8, (40,), training)
    assert violations(outcome, longer) == []


@pytest.mark.parametrize("newest", [1, 2])
def test_what_was_collected_meanwhile_is_not_written_again(monkeypatch, newest):
    """Its space may have been written over while it was read, which looks like damage."""
    wrote = []

    def read(*_):
        raise CorruptedObjectError("something else lies there")

    monkeypatch.setattr(_publish, "check_shard", read)
    monkeypatch.setattr(_publish, "rewrite_shard", lambda *_: wrote.append("again"))
    incarnation = SimpleNamespace(newest_done=lambda: [newest])
    assert _publish._whole_sums(incarnation, SimpleNamespace(sync=1, index=0), 0) is None
    assert wrote == (["again"] if newest == 1 else [])
