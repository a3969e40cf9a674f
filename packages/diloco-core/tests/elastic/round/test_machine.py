"""In whatever order lives act, the decision functions keep the rules of the protocol; without a rule, some order breaks it."""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
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
from diloco_core._run._round._shares import Shares


class Lives(RuleBasedStateMachine):
    """Lives of two or three ranks that look, stop, wake late, write late, and see listings that are old."""

    @initialize(
        ranks=st.sampled_from([2, 3]),
        spare=st.integers(0, 2),
        late=st.sampled_from(["carry", "drop"]),
        retention=st.sampled_from([1, 2, 4]),
    )
    def begin(self, ranks, spare, late, retention):
        self.world = World(ranks, max(1, ranks - spare), late=late, retention=retention)
        for rank in self.world.ranks:
            self.world.start(rank)

    def _life(self, number):
        living = [life for life in self.world.lives if life.request is not None]
        return living[number % len(living)] if living else None

    @rule(
        number=st.integers(0, 5),
        requests=st.sampled_from([1, 1, 2, 5, 12, 30]),
        behind=st.sampled_from([0, 0, 0, 1, 4]),
    )
    def goes_on(self, number, requests, behind):
        life = self._life(number)
        for _ in range(requests if life else 0):
            self.world.step(life, behind=behind)

    @rule(number=st.integers(0, 5), elapsed=st.sampled_from([0.0, 10.0, 30.0]))
    def has_waited(self, number, elapsed):
        life = self._life(number)
        if life is not None:
            hurry(life, overdue=True, elapsed=elapsed)

    @rule(number=st.integers(0, 5))
    def stops(self, number):
        life = self._life(number)
        if life is not None:
            life.request = None

    @rule(number=st.integers(0, 5))
    def is_cut_off_while_it_writes(self, number):
        life = self._life(number)
        if life is not None:
            self.world.step(life, torn=True)

    @precondition(lambda self: len(self.world.lives) < 12)
    @rule(rank=st.integers(0, 2))
    def begins_anew(self, rank):
        """Whatever the lives before it do: one that slept may go on at any time."""
        self.world.start(rank % len(self.world.ranks))

    @rule(number=st.integers(0, 99))
    def a_write_arrives_once_more(self, number):
        self.world.deliver_again(number)

    @rule(number=st.integers(0, 5))
    def a_bit_flips(self, number):
        life = self._life(number)
        if life is not None:
            self.world.flip(life)

    def teardown(self):
        if hasattr(self, "world"):
            settle(self.world)


def _explore(examples, steps, **options):
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


def test_every_rule_holds_in_any_order():
    _explore(50, 40)


@pytest.mark.slow
def test_every_rule_holds_in_many_orders():
    _explore(500, 80)


def _goes_wrong(seed, broken=(), steps=150):
    """What a random order of events in a run brings to light; empty where nothing."""
    chance = random.Random(seed)
    ranks = chance.choice([2, 3])
    world = World(
        ranks,
        chance.randint(1, ranks),
        late=chance.choice(["carry", "drop"]),
        retention=chance.choice([1, 2, 4]),
        broken=broken,
    )
    try:
        walk(world, seed, steps)
    except Violation as wrong:
        return str(wrong)
    return ""


def test_random_orders_are_right():
    assert [_goes_wrong(seed) for seed in range(20)] == [""] * 20


@pytest.mark.slow
def test_many_random_orders_are_right():
    assert {_goes_wrong(seed, steps=300) for seed in range(500)} == {""}


def truncated_contributions_count(monkeypatch):
    real = _membership.valid

    def valid(listing, **rest):
        return real(dict.fromkeys(listing, SIZE), **rest)

    monkeypatch.setattr(_membership, "valid", valid)


def _counted_steps_count_again(monkeypatch):
    """By itself it breaks nothing, since such steps are never of the state that a sync starts from: two rules guard that."""
    real = _membership.valid
    monkeypatch.setattr(
        _membership, "valid", lambda listing, **rest: real(listing, **{**rest, "positions": {}})
    )


def contributions_from_other_states_count(monkeypatch):
    real = _membership.valid

    def valid(listing, *, base, **rest):
        found = {}
        for other in {base, *(d.base for d in map(_membership.Delta.parse, listing) if d)}:
            found |= real(listing, base=other, **rest)
        return dict(sorted(found.items()))

    monkeypatch.setattr(_membership, "valid", valid)


def nobody_looks_whether_the_record_is_of_its_own_state(monkeypatch):
    monkeypatch.setattr(_membership, "on_record", lambda *args, **rest: _membership.Obey())


def no_quorum(monkeypatch):
    real = _membership.may_commit
    monkeypatch.setattr(
        _membership, "may_commit", lambda *args, **rest: real(*args, **{**rest, "min_replicas": 1})
    )


def the_quorum_counts_contributions_and_not_ranks(monkeypatch):
    real, folder = _membership.may_commit, _membership.read_folder
    seen = []

    def read_folder(at, listing):
        seen[:] = [each for each in map(_membership.Delta.parse, listing) if each is not None]
        return folder(at, listing)

    def may_commit(chosen, waited_for, *, min_replicas, **rest):
        enough = min_replicas if len(seen) < min_replicas else 1
        return real(chosen, waited_for, min_replicas=enough, **rest)

    monkeypatch.setattr(_membership, "read_folder", read_folder)
    monkeypatch.setattr(_membership, "may_commit", may_commit)


def carried_though_another_life_of_the_rank_is_named(monkeypatch):
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


def nobody_does_the_work_of_an_owner_that_is_late(monkeypatch):
    monkeypatch.setattr(Shares, "turn", lambda self, shard: 1e9)


def lost_inputs_are_no_reason_to_load_again(monkeypatch):
    monkeypatch.setattr(_shares, "inputs_are_superseded", lambda *args, **rest: False)


def half_a_state_counts_as_complete(monkeypatch):
    def newest_done(listing, fragments):
        return [max((sync for sync, _ in _rules.states(listing)), default=0)]

    monkeypatch.setattr(_rules, "newest_done", newest_done)


def only_the_newest_state_is_kept(monkeypatch):
    monkeypatch.setattr(
        _rules, "kept_from", lambda listing, fragments, **_: _rules.newest_done(listing, fragments)
    )


def everything_old_is_collected(monkeypatch):
    real = _rules.collectable

    def collectable(keys, *, last, kept, **rest):
        return real(keys, last=last, kept=[last], **{**rest, "retention": 0})

    monkeypatch.setattr(_rules, "collectable", collectable)


def collection_forgets_who_lags(monkeypatch):
    real = _rules.collectable
    monkeypatch.setattr(
        _rules, "collectable", lambda keys, **rest: real(keys, **{**rest, "retention": -1})
    )


RULES = {  # with the number of the first order that shows it, as a rule
    truncated_contributions_count: 0,
    contributions_from_other_states_count: 0,
    nobody_looks_whether_the_record_is_of_its_own_state: 133,
    no_quorum: 0,
    the_quorum_counts_contributions_and_not_ranks: 0,
    carried_though_another_life_of_the_rank_is_named: 35,
    what_is_counted_is_carried: 0,
    whoever_is_left_out_does_not_obey: 1,
    nobody_does_the_work_of_an_owner_that_is_late: 2,
    lost_inputs_are_no_reason_to_load_again: 2,
    half_a_state_counts_as_complete: 5,
    only_the_newest_state_is_kept: 0,
    everything_old_is_collected: 0,
    collection_forgets_who_lags: 3,
}
LIVES = {
    "own listing": 3,
    "no epochs": 11,
    "record before payload": 0,
    "overwriting": 7,
    "no replay": 0,
    "done first": 0,
}


def _found_out(first, broken=()):
    """What the first order that shows it brings to light; ``first``: where to look for it first."""
    orders = [*range(first, 300), *range(first)]
    return next(filter(None, (_goes_wrong(seed, broken) for seed in orders)), "")


@pytest.mark.parametrize("mutate", RULES, ids=lambda mutate: mutate.__name__)
def test_a_decision_that_breaks_a_rule_is_found_out(mutate, monkeypatch):
    mutate(monkeypatch)
    assert _found_out(RULES[mutate])


@pytest.mark.parametrize("broken", LIVES)
def test_a_life_that_does_not_do_what_is_decided_is_found_out(broken):
    assert _found_out(LIVES[broken], [broken])


@pytest.mark.parametrize(
    "mutate", [no_quorum, truncated_contributions_count, everything_old_is_collected]
)
def test_the_machine_finds_it_out_too(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(Violation):
        _explore(200, 40, phases=[Phase.generate])
