"""Test how a fixed run goes on, or ends, when one of its ranks is gone."""

import logging
import math
from dataclasses import replace

import pytest
from simulated import (
    Fault,
    Fixed,
    Killed,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    read_log,
    simulate,
    violations,
)

from diloco_core import FencedError, ReplicaLostError, RunExistsError
from diloco_core._run._records._keys import claim_key, commit_key
from diloco_core._run._records._records import Commit, GivenUp, Rollback

LOST_AFTER = 90.0
RANKS = 3


def lived(*faults, store=None, resume=False, training=None, **options):
    """Return what became of a run whose ranks have these faults; the dead start again after 5 s."""
    restart, allowance = options.pop("restart_after", 5.0), options.pop("return_within", 300.0)
    schedule = Schedule(RANKS, faults=faults, restart_after=restart)
    training = training or SimulatedTraining(5, (40, 30), 2)
    outcome = simulate(
        training, schedule, Fixed(LOST_AFTER, resume, allowance), store=store, **options
    )
    return outcome, training


def ends(outcome):
    return [record for record in read_log(outcome.store)[0] if isinstance(record, Rollback)]


@pytest.mark.parametrize(
    ("backend", "advice"),
    [
        ("", "If nothing starts it again, do that by hand, or end this replica with Ctrl-C."),
        ("eks", "Its launcher, or 'diloco status', says whether it is started again."),
    ],
)
def test_one_that_does_not_come_back_in_time_ends_the_run(backend, advice, monkeypatch, caplog):
    monkeypatch.setenv("DILOCO_BACKEND", backend)
    caplog.set_level(logging.WARNING)
    outcome, _ = lived(Fault(1, 1, 30, "kill after"), most_incarnations=1)
    (end,) = ends(outcome)
    assert end.end.missed == 1
    for rank in (0, 2):
        error = outcome.results[rank, 1]
        assert isinstance(error, ReplicaLostError)
        assert error.rank == 1
        assert "rank 1 has shown no sign of life for" in str(error)
        assert "start all of its ranks again with resume=True" in str(error)
        assert 'as rendezvous_uri, and "connect_options": {"resume": True}' in str(error)
    assert LOST_AFTER + 300 < outcome.seconds < LOST_AFTER + 400
    texts = [text for text in caplog.messages if "Waiting up to" in text]
    assert len(texts) == 2 * 5, "by two ranks, once a minute, in 300 s"
    assert "Waiting up to 300 s for it to be started again (return_within)" in texts[0]
    assert texts[0].endswith(f"If it is not back by then, this run ends. {advice}")


def test_one_that_dies_again_ends_the_run_as_well_wherever_that_is():
    """If its new incarnation has claimed the rank, it has the whole time once more."""
    claimed = 0
    for operation in range(14, 24):
        faults = Fault(1, 1, 30, "kill after"), Fault(1, 2, operation, "kill after")
        outcome, _ = lived(*faults, restart_after=120.0, most_incarnations=2, return_within=100.0)
        if isinstance(outcome.results[1, 2], Killed):
            (end,) = ends(outcome)
            assert end.end.missed == 1
            assert outcome.seconds < 500
            claimed += claim_key(1, 2) in outcome.store.objects
    assert claimed > 2


def failing(train, *, last=()):
    """Let rank 1 fail at its second sync; ``last`` has incarnations that nothing starts again."""

    def begins(node):
        exchange, began = node.exchange, node.exchange.begin
        exchange.last_attempt = node.incarnation in last
        taken = 0

        def begin(*arguments, **options):
            nonlocal taken
            taken += 1
            if node.rank != 1 or taken < 2:
                return began(*arguments, **options)
            error = ValueError("a bad batch")
            exchange.abort(error)
            raise error

        exchange.begin = begin
        return train(node)

    return begins


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("last", "seconds"), [({1, 2}, (0, 30)), ({2}, (120, 150)), ((), (420, 450))]
)
def test_only_one_that_can_be_started_again_is_waited_for(last, seconds):
    """The time begins anew with each failure."""
    outcome = simulate(
        failing(SimulatedTraining(5, (40, 30), 2), last=last),
        Schedule(RANKS, restart_after=120.0),
        Fixed(LOST_AFTER, return_within=300.0),
        most_incarnations=2,
    )
    (end,) = ends(outcome)
    (when,) = [time for time, key, _ in outcome.store.history if key == commit_key(end.sync)]
    assert seconds[0] <= when < seconds[1]
    for rank in (0, 2):
        error = outcome.results[rank, 1]
        assert isinstance(error, ReplicaLostError)
        assert "rank 1 failed after" in str(error)
        assert "ValueError: a bad batch" in str(error)
        assert error.final, "started again, it would be refused, and say less"


def test_where_ends_are_passed_over_a_rank_that_meets_one_may_be_started_again():
    earlier, training = lived(Fault(1, 1, 30, "kill after"), most_incarnations=1)
    resuming = failing(training, last={1})
    settings = Fixed(LOST_AFTER, True, 300.0)
    outcome = simulate(
        resuming, Schedule(RANKS), settings, store=earlier.store, most_incarnations=1
    )
    assert [outcome.results[rank, 1].final for rank in (0, 2)] == [False, False]
    assert outcome.seconds < 60


@pytest.mark.sampled
@pytest.mark.parametrize("operation", [30, 34, 50, 56, 60])
def test_the_limit_of_a_sync_ends_the_run_too(operation, caplog):
    """``sync_timeout`` (600 s here) bounds ``return_within``, for contributions as for shards."""
    outcome, _ = lived(
        Fault(1, 1, operation, "kill after"), most_incarnations=1, return_within=10_000.0
    )
    (end,) = ends(outcome)
    assert end.end.missed == 1
    assert 600 < outcome.seconds < 800
    assert "Waiting up to 600 s for it to be started again (sync_timeout)." in caplog.text
    assert "return_within" not in caplog.text
    for rank in (0, 2):
        assert isinstance(outcome.results[rank, 1], ReplicaLostError)
        assert "rank 1 has shown no sign of life for" in str(outcome.results[rank, 1])


@pytest.mark.parametrize(
    ("fails", "opens", "faults"),
    [((1, 2), "state/", [Fault(1, 1, 75, "kill after")]), ((1, 1), "state/00000002/", [])],
    ids=["while it loads", "while it adopts a sync"],
)
def test_one_that_fails_says_why_to_those_who_wait_for_it(fails, opens, faults):
    """It says so at the sync at which they wait, although it has not come that far."""

    def failing(key):
        if key.startswith(opens):
            raise ValueError("bad disk")

    def prepare(node):
        if (node.rank, node.incarnation) == fails:
            node.before("open", failing)

    outcome, _ = lived(*faults, most_incarnations=fails[1], prepare=prepare)
    assert str(outcome.results[fails]) == "bad disk"
    (end,) = ends(outcome)
    assert end.sync > 2
    assert "ValueError: bad disk" in end.end.why


@pytest.mark.parametrize("gone", [True, False])
def test_a_process_that_is_known_to_be_dead_is_lost_sooner(monkeypatch, gone):
    """It ran on this machine.

    The claim that is asked for is that of the incarnation whose sign of life is missed.
    """
    asked = []
    monkeypatch.setattr(
        "diloco_core._run._policy._others.incarnation_is_gone",
        lambda *incarnation: asked.append(incarnation[1:]) or gone,
    )
    outcome, _ = lived(Fault(1, 1, 30, "kill after"), most_incarnations=1, return_within=0.0)
    assert len(ends(outcome)) == 1
    assert outcome.seconds < LOST_AFTER if gone else LOST_AFTER < outcome.seconds < LOST_AFTER + 60
    assert set(asked) == {(1, 1)}


def test_an_ended_run_is_not_joined_without_resume():
    training = SimulatedTraining(5, (40, 30), 2)
    first, _ = lived(Fault(1, 1, 30, "kill after"), most_incarnations=1, training=training)
    objects = dict(first.store.objects)
    refused, _ = lived(
        store=first.store, most_incarnations=1, training=SimulatedTraining(5, (40, 30), 2)
    )
    for result in refused.results.values():
        assert isinstance(result, RunExistsError)
        assert "has ended: rank 1 has shown no sign of life" in str(result)
    assert refused.store.objects == objects
    # Of a reason no more is shown than is ever written.
    (end,) = ends(first)
    endless = replace(end, end=end.end._replace(why="x" * 10**6))
    first.store.damage(commit_key(end.sync), endless.to_json())
    shown, _ = lived(store=first.store, most_incarnations=1)
    assert all(len(str(result)) < 2500 for result in shown.results.values())
    training.salts.clear()
    resumed, training = lived(store=first.store, resume=True, training=training)
    assert resumed.finished
    assert resumed.errors() == {}


def test_one_that_comes_back_too_late_meets_the_end():
    outcome, _ = lived(Fault(1, 1, 30, "kill after"), restart_after=500.0, most_incarnations=2)
    assert len(ends(outcome)) == 1
    assert isinstance(outcome.results[1, 2], RunExistsError)


def test_one_that_has_just_claimed_its_rank_is_not_given_up():
    """Although its first sign of life comes only after the time that the others allow it."""
    gone_on = 0
    for operation in range(18, 21):
        faults = Fault(1, 1, 30, "kill after"), Fault(1, 2, operation, "delay", 40.0)
        outcome, _ = lived(*faults, restart_after=170.0, most_incarnations=2, return_within=100.0)
        gone_on += outcome.finished
        since = {key: time for time, key, _ in reversed(outcome.store.history)}
        for end in ends(outcome):
            assert since[commit_key(end.sync)] < since.get(claim_key(1, 2), math.inf)
    assert gone_on


def test_of_two_processes_of_a_rank_the_earlier_one_is_fenced():
    outcome, training = lived(Fault(1, 1, 40, "zombie", 60.0))
    late = "has left the run"
    assert [what for what in violations(outcome, training) if late not in what] == []
    fenced = [result for result in outcome.results.values() if isinstance(result, FencedError)]
    assert [(error.rank, error.epoch) for error in fenced] == [(1, 1)]


def test_a_rank_that_is_started_again_goes_on(caplog):
    caplog.set_level(logging.INFO)
    for operation in range(8, 60, 4):
        outcome, training = lived(Fault(1, 1, operation, "kill before"))
        assert violations(outcome, training) == []
        assert isinstance(outcome.results[1, 1], Killed)
        assert ends(outcome) == []
    assert "counts as nothing" in caplog.text
    back = "rank 1 is back: it takes part in sync 2, as incarnation 2"
    assert {f"rank {rank}: {back}" for rank in (0, 2)} <= {*caplog.messages}


SYNC = 3


def gives_up(store, commit):
    """Rank 1 is given up."""
    record = Rollback(
        SYNC + 1, (SYNC, SYNC - 1), (), {0: 1, 1: 1}, run=commit.run,
        end=GivenUp(1, 0, "rank 1 has shown no sign of life"),
    )  # fmt: skip
    store.write(commit_key(SYNC + 1), record.to_json())


def replaces(store, commit):
    """The next sync is decided with a newer incarnation of rank 0, which also deletes things."""
    members = tuple(replace(member, sync=SYNC + 1, epoch=2) for member in commit.members)
    store.write(claim_key(0, 2), b"{}")
    store.write(commit_key(SYNC + 1), replace(commit, sync=SYNC + 1, members=members).to_json())


@pytest.mark.parametrize(
    ("meddle", "error"), [(gives_up, ReplicaLostError), (replaces, FencedError)]
)
def test_what_was_decided_meanwhile_is_obeyed(meddle, error):
    training, store, meddled = SimulatedTraining(6, (40, 30), 2), SimulatedStore(), []

    def opened(key):
        if key.startswith(f"state/{SYNC:08}/"):
            if not meddled:
                meddle(store, Commit.from_json(store.objects[commit_key(SYNC)], SYNC, ""))
            meddled.append(key)

    def prepare(node):
        if (node.rank, node.incarnation) == (0, 1):
            node.before("open", opened)

    settings, options = Fixed(90.0, return_within=100.0), {"most_incarnations": 2}
    outcome = simulate(training, Schedule(2), settings, store=store, prepare=prepare, **options)
    assert meddled
    assert isinstance(outcome.results[0, 1], error), outcome.results
    assert [report.sync for report in training.reports[0, 1]] == [*range(1, SYNC)]
