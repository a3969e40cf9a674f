"""A record is lost without a trace and decided again: nobody goes on from the first one."""

from dataclasses import replace

from simulated import (
    Killed,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    once,
    read_log,
    simulate,
    violations,
)

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._records._keys import commit_key, done_key
from diloco_core._run._records._records import Commit

LOST = 3
FORKED = "commits/00000003.json is no longer the record that this replica has obeyed"


def _fork(*, leaves_at=0, sleeper_ends_at=0, syncs=8, seconds=300.0):
    """Rank 0 sleeps after sync 3, whose record is lost; rank 1 comes back and decides sync 3 alone,
    and perhaps leaves then.

    Returns the store, the training, the outcome and what is wrong, but for the two states after
    sync 3.
    """
    store = SimulatedStore()
    training = SimulatedTraining(syncs=syncs, sizes=(40,), sync_every=2, pauses={(0, 6): seconds})

    def shorter(syncs):
        return replace(training, syncs=syncs, reports={}, held={}, mixed={}, timelines={}, took={})

    def killed(node):
        node.exchange.leave = lambda: node.exchange.abort(Killed())

    def train(node):
        if (node.rank, node.incarnation) == (1, 2):
            assert commit_key(LOST) in store.objects
            assert commit_key(LOST + 1) not in store.objects
            store.remove(commit_key(LOST))
            del store.decided[commit_key(LOST)]
            for key in [*store.objects]:
                if key.startswith(f"deltas/{LOST:08}/00000"):
                    store.remove(key)
            if leaves_at:
                killed(node)  # so nothing is published that shows what it held
                return shorter(leaves_at)(node)
        elif node.rank == 1:
            killed(node)
            shorter(LOST)(node)
            raise Killed
        elif node.rank == 0 and sleeper_ends_at:
            leave = node.exchange.leave
            node.exchange.leave = lambda: (node.sleep(300.0), leave())
            return shorter(sleeper_ends_at)(node)
        return training(node)

    schedule = Schedule(2, latency=0.001, restart_after=20.0)
    settings = Elastic(1, grace=5.0, topology="gather", publish_every=4, retention=4)
    outcome = simulate(train, schedule, settings, store=store, most_incarnations=2)
    wrong = [
        text
        for text in violations(outcome, training)
        # Nor does the log say any more how the sleeper's contribution to the first record counted.
        if not text.startswith((f"after sync {LOST},", f"sync {LOST} counts steps None"))
    ]
    return store, training, outcome, wrong


def test_a_sleeper_decides_nothing_on_a_replaced_record(caplog):
    store, training, outcome, wrong = _fork(leaves_at=LOST)
    assert wrong == []
    assert outcome.results[0, 1] == 8
    assert FORKED in caplog.text
    log, broken = read_log(store)
    assert broken == []
    assert [member.rank for member in log[LOST - 1].members] == [1]
    # What it had learned from the other state is not in the run.
    assert sum(report.reloaded for report in training.reports[0, 1]) == 1
    # As the log says: the next contribution that counts is of later batches, and an incarnation
    # that began after it would not go back.
    assert "does not hold the inner steps of this replica from step 4 on" in caplog.text
    warning = "The batches of the steps before 8 are lost, unless this replica is restarted before"
    assert warning in caplog.text
    assert [(member.start, member.stop) for member in log[LOST].members] == [(8, 10)]


def test_a_sleeper_goes_on_from_what_the_others_decided(caplog):
    """They are further than the record that was decided again."""
    _, training, outcome, wrong = _fork(syncs=16, seconds=45.0)
    assert wrong == []
    assert outcome.results[0, 1] == 16
    assert FORKED in caplog.text
    assert "newest-whole" not in caplog.text
    assert sum(report.reloaded for report in training.reports[0, 1]) == 1
    ends = {rank: copies for rank, _, copies in training.states[16]}
    assert len(ends) == 2
    assert all(bool((a == b).all()) for a, b in zip(*ends.values(), strict=True))


def test_a_sleeper_publishes_nothing_of_a_replaced_record(caplog):
    store, _, outcome, _ = _fork(leaves_at=LOST, sleeper_ends_at=LOST)
    assert outcome.results[0, 1] == LOST
    assert FORKED in caplog.text
    assert not store.below("state")


def test_a_state_that_was_published_for_another_record_is_not_taken(publishing):
    store, training = SimulatedStore(), SimulatedTraining(syncs=3, sizes=(40,))
    settings = publishing(2, grace=5.0)
    simulate(training, Schedule(2), settings, store=store)
    assert done_key(3, 0) in store.objects
    other = replace(
        Commit.from_json(store.objects[commit_key(3)], 3, ""), positions={0: 6, 1: 6, 2: 1}
    )
    store.damage(commit_key(3), other.to_json())
    outcome = once(training, Schedule(2), replace(settings, resume=True), store=store)
    errors = outcome.errors().values()
    assert {type(error) for error in errors} == {CorruptedObjectError}
    assert all("was published for another record" in str(error) for error in errors)
