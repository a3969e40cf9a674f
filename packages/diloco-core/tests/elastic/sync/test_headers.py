"""Damage in what only the next update of a shard reads: the header of its file, and the outer
optimizer's state.

It shows when an incarnation begins, is made again at once, and costs nothing. Where it shows later
all the same, it costs nothing either, as long as the shard can be computed again; otherwise reports
and log say what is lost.
"""

import logging

import pytest
from damage_lab import flip, store_of
from simulated import Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic

pytestmark = pytest.mark.sampled

_SYNCS, _END = 4, 8
_SIZES = (96, 80)
_FRAGMENTS = len(_SIZES)
# By fragment: after which sync its state is, where the run stopped; the fifth was the flush.
_NEWEST = {0: 5, 1: 4}


class _Run:
    """A run of two fragments that has stopped, to be damaged and gone on with."""

    def __init__(self, ranks, min_replicas):
        self.ranks = ranks
        self.settings = Elastic(min_replicas, grace=5.0, topology="sharded")
        self.first = SimulatedTraining(syncs=_SYNCS, sizes=_SIZES, sync_every=4)
        self.objects = simulate(self.first, ranks, self.settings).store.objects

    def resumed(self, damage, *, alone=False, lost=()):
        """Go on with some objects replaced, and others lost when a replica has begun."""
        store = store_of(self.objects)
        for key, data in damage.items():
            store.damage(key, data)
        salts = dict(self.first.salts)
        training = SimulatedTraining(_END, _SIZES, 4, salts=salts, save_every=100)
        starts = [0.0, *[1e6] * (self.ranks - 1)] if alone else ()
        schedule = Schedule(self.ranks, seed=1, latency=0.01, starts=starts)
        gone = list(lost)

        def lose(key):
            while key.startswith("deltas/") and gone:
                store.remove(gone.pop())

        options = {"most_incarnations": 1, "limit": 1e5}
        options["prepare"] = lambda node: node.before("put", lose)
        outcome = simulate(training, schedule, self.settings, store=store, **options)
        wrong = violations(outcome, training)
        assert all(alone and "not every rank" in what for what in wrong), (damage.keys(), wrong)
        assert all(number == 1 for _, number in training.reports), "nobody had to start again"
        return outcome, training


def _final(outcome):
    """The bytes of the states that a run ended with."""
    states = {key: data for key, data in outcome.store.objects.items() if key.startswith("state/")}
    last = sorted({key.split("/")[1] for key in states})[-_FRAGMENTS:]
    assert int(last[-1]) >= _END
    return {key: data for key, data in states.items() if key.split("/")[1] in last}


def _places(data):
    """Bytes of a shard's file that nothing but the next update reads, by name."""
    header = 8 + int.from_bytes(data[:8], "little")
    scalars, names = data.index(b"scalars"), data.index(b"fingerprint")
    return {
        "length": 0,
        "length, high": 6,
        "brace": 8,
        "sync": data.index(b'"sync"') + 8,
        "fingerprint": names + 20,
        "scalars": scalars + 2,
        "end of the header": header - 1,
        "outer state": header + 2,
        "checksum of it": header + (len(data) - 16 - header) // 2 - 4,
    }


def _key(fragment, shard):
    return f"state/{_NEWEST[fragment]:08}/{fragment:03}.{shard:05}.safetensors"


@pytest.fixture(scope="module")
def run():
    return _Run(2, 1)


@pytest.fixture(scope="module")
def undamaged(run):
    return {alone: _final(run.resumed({}, alone=alone)[0]) for alone in (False, True)}


_FEW = ["length", "fingerprint", "outer state"]
_ALL = [*_FEW, "length, high", "brace", "sync", "scalars", "end of the header", "checksum of it"]
_PLACES = [*_FEW, *(pytest.param(place, marks=pytest.mark.slow) for place in _ALL[len(_FEW) :])]


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("fragment", range(_FRAGMENTS))
@pytest.mark.parametrize("shard", range(2))
def test_it_is_found_and_mended_before_anybody_trains(
    run, undamaged, caplog, shard, fragment, place
):
    key = _key(fragment, shard)
    whole = run.objects[key]
    with caplog.at_level(logging.INFO, "diloco_core"):
        outcome, training = run.resumed({key: flip(whole, 8 * _places(whole)[place] + 1)})
    messages = caplog.messages
    again = f"writing {key} again with the same content"
    begins = f"rank {shard}: has joined the run as incarnation 2, at sync 5"
    assert [again in text for text in messages if again in text or begins in text] == [True, False]
    assert _final(outcome) == undamaged[False]
    assert not any(report.reloaded for reports in training.reports.values() for report in reports)


@pytest.mark.parametrize("place", [*_PLACES, "all"])
def test_who_resumes_alone_mends_the_parts_of_others(run, undamaged, caplog, place):
    keys = [_key(fragment, 1) for fragment in range(_FRAGMENTS)]
    wholes = {key: run.objects[key] for key in keys if place != "all"}
    damage = {key: flip(data, 8 * _places(data)[place] + 2) for key, data in wholes.items()}
    outcome, training = run.resumed(damage, alone=True, lost=keys if place == "all" else ())
    assert all(f"writing {key} again with the same content" in caplog.text for key in keys)
    assert _final(outcome) == undamaged[True]
    assert [report.inner_steps for report in training.reports[0, 1]] == [2, 4, 4, 2]
    assert not any(report.reloaded for report in training.reports[0, 1])
