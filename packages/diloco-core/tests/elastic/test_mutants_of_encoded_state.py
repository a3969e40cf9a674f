"""Every rule of encoded state is needed: without it, some simulated run goes wrong."""

import random
from functools import partial

import pytest
from faults_lab import HARMFUL, assert_caught
from fixed_lab import LATE, LOST_AFTER
from simulated import CheckedStore, Fault, Fixed, Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic
from diloco_core._arithmetic._coded import Encoded, encode_update
from diloco_core._outer import _fragment
from diloco_core._run._incarnation import _incarnation
from diloco_core._run._records._rules import newest_done
from diloco_core._run._states import _publish as _elastic_publish
from diloco_core._run._sync import _compute, _result
from diloco_core._wire._coded import CodedShard
from diloco_core._wire._published import end_sums

POLICIES = {
    "elastic": Elastic(2, grace=6.0, topology="sharded", retention=1),
    "fixed": Fixed(LOST_AFTER),
}


def _wrong_encoded(policy, number):
    """Return what goes wrong with encoded state, and replicas that are late, die and come back."""
    chance = random.Random(number)
    faults = [
        Fault(
            chance.randrange(3), 1, chance.randint(10, 130), chance.choice((*HARMFUL, "flip")), 30.0
        )
        for _ in range(5)
    ]
    training = SimulatedTraining(syncs=8, sizes=(100,), state_codec="e2m1", full_state_every=3)
    starts = [0.0, 0.0, chance.choice([0.0, 9.0])]
    schedule = Schedule(
        3, seed=number, starts=starts, faults=faults, restart_after=2.0, latency=0.1
    )
    outcome = simulate(training, schedule, POLICIES[policy], store=CheckedStore(), limit=5000.0)
    return [what for what in violations(outcome, training) if LATE not in what]


def private_residual(monkeypatch):
    """Keep what a change has lost with the owner, and do not publish it."""

    def encode(self, coded, piece, old):
        lost, state = coded.__dict__.setdefault("lost", {}), self.outer.tensors(piece)
        update = encode_update(coded.codec, old, self.destination(piece), lost.get(piece))
        encoded = {name: coded.codec.encode(values) for name, values in state.items()}
        for name, data in encoded.items():
            coded.codec.decode(data, state[name])
        lost[piece] = update.residual
        coded.chunks[piece] = Encoded(update.data, encoded)

    monkeypatch.setattr(_fragment.Fragment, "_encode_update", encode)


def the_owner_keeps_its_exact_values(monkeypatch):
    encode = _fragment.encode_update

    def exact(codec, old, new, residual):
        before = new.clone()
        update = encode(codec, old, new, residual)
        new.copy_(before)
        return update

    monkeypatch.setattr(_fragment, "encode_update", exact)


def _without_sums(monkeypatch):
    """Nobody compares what comes of a change with what its owner holds."""

    def add(self, reader, origin, expected):
        self._add_update(reader, origin)
        return end_sums(reader, origin)

    monkeypatch.setattr(CodedShard, "_add", add)


def start_from_a_state_that_is_not_whole(monkeypatch):
    """An incarnation takes the newest change for the whole state."""
    _without_sums(monkeypatch)
    monkeypatch.setattr(_incarnation, "made_of", lambda sync, *_: [sync])


def collect_whole_states_too_early(monkeypatch):
    monkeypatch.setattr(
        _elastic_publish, "states_kept_from", lambda listing, fragments, kept, **_: kept
    )


def collect_changes_that_are_needed(monkeypatch):
    def newest(listing, fragments, kept, **_):
        return newest_done(listing, fragments)

    monkeypatch.setattr(_elastic_publish, "states_kept_from", newest)


def add_to_a_stale_base(monkeypatch):
    """An incarnation adds a published change to what it has computed so far."""
    _without_sums(monkeypatch)
    monkeypatch.setattr(_result, "read_values", lambda *_, **__: None)
    monkeypatch.setattr(_compute.Computation, "_is_same", lambda self, shard: False)


ENCODED = {  # with the first run of each policy that shows it, as a rule
    private_residual: {"elastic": 0, "fixed": 0},
    the_owner_keeps_its_exact_values: {"elastic": 0, "fixed": 0},
    start_from_a_state_that_is_not_whole: {"elastic": 0, "fixed": 1},
    add_to_a_stale_base: {"elastic": 0, "fixed": 12},
    collect_whole_states_too_early: {"elastic": 0, "fixed": 0},
    collect_changes_that_are_needed: {"elastic": 0, "fixed": 0},
}


@pytest.mark.sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mutate", ENCODED, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_of_encoded_state_is_caught(mutate, policy):
    first = ENCODED[mutate][policy]
    assert_caught(partial(_wrong_encoded, policy), mutate, first=first, runs=20)
