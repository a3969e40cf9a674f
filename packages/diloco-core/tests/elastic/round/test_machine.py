"""In whatever order incarnations act, the decision functions keep the rules of the protocol;
without a rule, some order breaks it.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from round_lab import SIZE, Violation, World, hurry, settle, walk

from diloco_core._run._records import _rules
from diloco_core._run._round import _membership, _shares


class Incarnations(RuleBasedStateMachine):
    """Incarnations of two or three ranks that look, stop, wake late, write late, and see listings
    that are old.
    """

    fixed = False

    @initialize(
        ranks=st.sampled_from([2, 3]),
        spare=st.integers(0, 2),
        late=st.sampled_from(["carry", "drop"]),
        retention=st.sampled_from([1, 2, 4]),
    )
    def begin(self, ranks, spare, late, retention):
        quorum = max(1, ranks - spare)
        self.world = World(ranks, quorum, late=late, retention=retention, fixed=self.fixed)
        for rank in self.world.ranks:
            self.world.start(rank)

    def _incarnation(self, number):
        living = [
            incarnation
            for incarnation in self.world.incarnations
            if incarnation.request is not None
        ]
        return living[number % len(living)] if living else None

    @rule(
        number=st.integers(0, 5),
        requests=st.sampled_from([1, 1, 2, 5, 12, 30]),
        behind=st.sampled_from([0, 0, 0, 1, 4]),
    )
    def goes_on(self, number, requests, behind):
        incarnation = self._incarnation(number)
        for _ in range(requests if incarnation else 0):
            self.world.step(incarnation, behind=behind)

    @rule(number=st.integers(0, 5), elapsed=st.sampled_from([0.0, 10.0, 30.0]))
    def has_waited(self, number, elapsed):
        incarnation = self._incarnation(number)
        if incarnation is not None:
            hurry(incarnation, overdue=True, elapsed=elapsed)

    @rule(number=st.integers(0, 5))
    def stops(self, number):
        incarnation = self._incarnation(number)
        if incarnation is not None:
            incarnation.request = None

    @rule(number=st.integers(0, 5))
    def is_cut_off_while_it_writes(self, number):
        incarnation = self._incarnation(number)
        if incarnation is not None:
            self.world.step(incarnation, torn=True)

    @precondition(lambda self: len(self.world.incarnations) < 12)
    @rule(rank=st.integers(0, 2))
    def begins_anew(self, rank):
        """Whatever the incarnations before it do: one that slept may go on at any time."""
        self.world.start(rank % len(self.world.ranks))

    @rule(number=st.integers(0, 99))
    def a_write_arrives_once_more(self, number):
        self.world.deliver_again(number)

    @rule(number=st.integers(0, 5))
    def a_bit_flips(self, number):
        incarnation = self._incarnation(number)
        if incarnation is not None:
            self.world.flip(incarnation)

    def teardown(self):
        if hasattr(self, "world"):
            settle(self.world)


class FixedIncarnations(Incarnations):
    """The same, where all ranks are in every sync."""

    fixed = True


POLICIES = {"elastic": Incarnations, "fixed": FixedIncarnations}


def _explore(policy, examples, steps, **options):
    run_state_machine_as_test(
        POLICIES[policy],
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("examples", "steps"), [(50, 40), pytest.param(500, 80, marks=pytest.mark.slow)]
)
def test_every_rule_holds_in_any_order(policy, examples, steps):
    _explore(policy, examples, steps)


def _goes_wrong(policy, seed, broken=(), steps=150):
    """What a random order of events in a run brings to light; empty where nothing."""
    chance = random.Random(seed)
    ranks = chance.choice([2, 3])
    world = World(
        ranks,
        chance.randint(1, ranks),
        late=chance.choice(["carry", "drop"]),
        retention=chance.choice([1, 2, 4]),
        broken=broken,
        fixed=POLICIES[policy].fixed,
    )
    try:
        walk(world, seed, steps)
    except Violation as wrong:
        return str(wrong)
    return ""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("seeds", "steps"), [(20, 150), pytest.param(500, 300, marks=pytest.mark.slow)]
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
        found = {}
        for base in {at.base, *(d.base for d in map(_membership.Delta.parse, listing) if d)}:
            found |= real(replace(at, base=base), listing)
        return dict(sorted(found.items()))

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

    def fate(commit, rank, own, *, learned, late):
        if own is not None and own not in commit.members:
            return "carried"
        return real(commit, rank, own, learned=learned, late=late)

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
INCARNATIONS = {  # likewise
    "own listing": {"elastic": 3, "fixed": 118},
    "no epochs": {"elastic": 11, "fixed": 0},
    "record before payload": {"elastic": 0, "fixed": 0},
    "overwriting": {"elastic": 7, "fixed": 0},
    "no replay": {"elastic": 0, "fixed": 0},
    "done first": {"elastic": 0, "fixed": 0},
}


def _found_out(policy, first, broken=()):
    """What the first order that shows it brings to light; ``first``: where to look for it first."""
    orders = [*range(first, 300), *range(first)]
    return next(filter(None, (_goes_wrong(policy, seed, broken) for seed in orders)), "")


def _cases(table):
    return [
        pytest.param(policy, wrong, first, id=f"{policy}-{getattr(wrong, '__name__', wrong)}")
        for wrong, orders in table.items()
        for policy, first in orders.items()
    ]


@pytest.mark.parametrize(("policy", "mutate", "first"), _cases(RULES))
def test_a_decision_that_breaks_a_rule_is_found_out(policy, mutate, first, monkeypatch):
    mutate(monkeypatch)
    assert _found_out(policy, first)


@pytest.mark.parametrize(("policy", "broken", "first"), _cases(INCARNATIONS))
def test_an_incarnation_that_does_not_do_what_is_decided_is_found_out(policy, broken, first):
    assert _found_out(policy, first, [broken])
