"""In whatever order incarnations act, the decision functions keep the rules of the protocol."""

import random
from dataclasses import replace

import pytest
from round_lab import SIZE, Violation, World, walk

from diloco_core._run._records import _rules
from diloco_core._run._round import _membership, _shares

POLICIES = ["elastic", "fixed"]


def _goes_wrong(policy, seed, steps=150):
    """Return what goes wrong in a run with a random order of events."""
    chance = random.Random(seed)
    ranks = chance.choice([2, 3])
    world = World(
        ranks,
        chance.randint(1, ranks),
        late=chance.choice(["carry", "drop"]),
        retention=chance.choice([1, 2, 4]),
        fixed=policy == "fixed",
    )
    try:
        walk(world, seed, steps)
    except Violation as wrong:
        return str(wrong)
    return ""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("seeds", "steps"), [(20, 150), pytest.param(1500, 300, marks=pytest.mark.slow)]
)
def test_random_orders_are_right(policy, seeds, steps):
    assert {_goes_wrong(policy, seed, steps=steps) for seed in range(seeds)} == {""}


def truncated_contributions_count(monkeypatch):
    real = _membership.Round.valid

    def valid(at, listing):
        return real(at, dict.fromkeys(listing, SIZE))

    monkeypatch.setattr(_membership.Round, "valid", valid)


def _counted_steps_count_again(monkeypatch):
    """By itself it breaks nothing, since such steps are never of the state that a sync starts from:
    two rules guard that.
    """
    real = _membership.Round.valid

    def valid(at, listing):
        return real(replace(at, positions={}), listing)

    monkeypatch.setattr(_membership.Round, "valid", valid)


def contributions_from_other_states_count(monkeypatch):
    real = _membership.Round.valid

    def valid(at, listing):
        valid = {}
        for base in {at.base, *(d.base for d in map(_membership.Delta.parse, listing) if d)}:
            valid |= real(replace(at, base=base), listing)
        return dict(sorted(valid.items()))

    monkeypatch.setattr(_membership.Round, "valid", valid)


def nobody_looks_whether_the_record_is_of_its_own_state(monkeypatch):
    monkeypatch.setattr(_membership, "on_record", lambda *args, **rest: _membership.Obey())


def the_quorum_counts_contributions_and_not_ranks(monkeypatch):
    real, folder = _membership.Round.may_commit, _membership.read_folder
    seen = []

    def read_folder(at, listing):
        seen[:] = [each for each in map(_membership.Delta.parse, listing) if each is not None]
        return folder(at, listing)

    def may_commit(at, folder, *, overdue):
        enough = at.min_replicas if len(seen) < at.min_replicas else 1
        return real(replace(at, min_replicas=enough), folder, overdue=overdue)

    monkeypatch.setattr(_membership, "read_folder", read_folder)
    monkeypatch.setattr(_membership.Round, "may_commit", may_commit)


def carried_though_another_incarnation_of_the_rank_is_named(monkeypatch):
    real = _membership.fate

    def fate(commit, rank, delta, *, learned, late):
        if delta is not None and delta not in commit.members:
            return "carried"
        return real(commit, rank, delta, learned=learned, late=late)

    monkeypatch.setattr(_membership, "fate", fate)
    _counted_steps_count_again(monkeypatch)


def what_is_counted_is_carried(monkeypatch):
    monkeypatch.setattr(_membership, "fate", lambda *args, **rest: "carried")
    _counted_steps_count_again(monkeypatch)


def whoever_is_left_out_does_not_obey(monkeypatch):
    real = _membership.on_record

    def on_record(at, commit, *, follows):
        left_out = at.rank not in {member.rank for member in commit.members}
        return _membership.NotNext() if left_out else real(at, commit, follows=follows)

    monkeypatch.setattr(_membership, "on_record", on_record)


def lost_inputs_are_no_reason_to_load_again(monkeypatch):
    monkeypatch.setattr(_shares, "inputs_are_superseded", lambda *args, **rest: False)


def half_a_state_counts_as_complete(monkeypatch):
    def newest_done(listing, fragments):
        return [max((sync for sync, _ in _rules.states(listing)), default=0)]

    monkeypatch.setattr(_rules, "newest_done", newest_done)


def collection_forgets_who_lags(monkeypatch):
    real = _rules.collectable
    monkeypatch.setattr(
        _rules, "collectable", lambda keys, **rest: real(keys, **{**rest, "retention": -1})
    )


# With the number of the first order that shows it, as a rule, for each policy that has the rule.
# Rules that simulated runs lack in test_mutants.py and test_fixed_mutants.py are left out.
RULES = {
    truncated_contributions_count: {"elastic": 0, "fixed": 77},
    contributions_from_other_states_count: {"elastic": 0},
    nobody_looks_whether_the_record_is_of_its_own_state: {"elastic": 133},
    the_quorum_counts_contributions_and_not_ranks: {"elastic": 0},
    carried_though_another_incarnation_of_the_rank_is_named: {"elastic": 35, "fixed": 144},
    what_is_counted_is_carried: {"elastic": 0, "fixed": 0},
    whoever_is_left_out_does_not_obey: {"elastic": 1},
    lost_inputs_are_no_reason_to_load_again: {"elastic": 2, "fixed": 4},
    half_a_state_counts_as_complete: {"elastic": 5, "fixed": 4},
    collection_forgets_who_lags: {"elastic": 3},
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("policy", "mutate", "first"),
    [
        pytest.param(policy, mutate, first, id=f"{policy}-{mutate.__name__}")
        for mutate, orders in RULES.items()
        for policy, first in orders.items()
    ],
)
def test_a_decision_that_breaks_a_rule_is_found_out(policy, mutate, first, monkeypatch):
    mutate(monkeypatch)
    assert any(_goes_wrong(policy, seed) for seed in [*range(first, 300), *range(first)])
