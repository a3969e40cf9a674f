"""Random schedules of runs with fixed membership, in virtual time, and what is wrong with them."""

import random

from simulated import (
    CheckedStore,
    Fault,
    Fixed,
    Schedule,
    SimulatedTraining,
    read_log,
    simulate,
    violations,
)

from diloco_core import ReplicaLostError
from diloco_core._run._records._records import Rollback

LOST_AFTER = 90.0
#: A hung process is taken for dead and goes on all the same: what was started in its place may come
#: after its end.
LATE = "has left the run"


def wrong(schedule, training, *, resume=False, **options):
    """Return what is wrong with a run, and what became of it."""
    settings = Fixed(LOST_AFTER, resume)
    outcome = simulate(training, schedule, settings, store=CheckedStore(), **options)
    return [what for what in violations(outcome, training) if LATE not in what], outcome


def random_run(seed, kinds):
    """Return what is wrong with a run whose faults are of these kinds."""
    chance = random.Random(seed)
    size = chance.randint(2, 3)
    faults = [
        Fault(
            chance.randrange(size), chance.randint(1, 2), chance.randint(1, 100),
            chance.choice(kinds), chance.choice([60.0, 120.0, 300.0]),
        )
        for _ in range(chance.randint(2, 6))
    ]  # fmt: skip
    schedule = Schedule(size, seed=seed, faults=faults, restart_after=chance.choice([0.1, 5.0]))
    return wrong(schedule, SimulatedTraining(4, (40,), 2))[0]


#: How incarnations end that meet an end of the run, and what follows for the run.
ENDED = ("raised ReplicaLostError", "raised RunExistsError", "not every rank came to the end", LATE)


def random_ended_run(seed):
    """What is wrong with a run whose ranks may come back too late, and with its continuation.

    The allowance is about as long as the dead stay away, so that returns and ends meet.
    """
    chance = random.Random(seed)
    size = chance.randint(2, 3)
    store, wrongs_so_far, salts = CheckedStore(), [], {}
    for resume in (False, True):
        faults = [
            Fault(
                chance.randrange(size), 1, chance.randint(1, 70),
                chance.choice(["kill before", "kill after", "zombie", "lose answer"]),
                chance.choice([100.0, 160.0, 200.0, 300.0]),
            )
            for _ in range(chance.randint(1, 3))
        ]  # fmt: skip
        training = SimulatedTraining(4, (40,), 2, salts=dict(salts))
        restart = chance.choice([5.0, 100.0, 150.0, 155.0, 160.0, 400.0])
        schedule = Schedule(size, seed=seed + resume, faults=faults, restart_after=restart)
        settings = Fixed(LOST_AFTER, resume, chance.choice([0.0, 60.0]))
        seen = len(read_log(store)[0]) if resume else 0
        outcome = simulate(training, schedule, settings, store=store, most_incarnations=2)
        wrongs = violations(outcome, training)
        wrongs_so_far += [what for what in wrongs if not any(allowed in what for allowed in ENDED)]
        wrongs_so_far += _against_the_end(outcome, read_log(store)[0][seen:], resume=resume)
        salts = training.salts
        if wrongs_so_far or outcome.finished:
            break
    return wrongs_so_far


def _against_the_end(outcome, log, *, resume):
    """What was done although the run had ended, or without an end; ``log`` is what was added."""
    wrongs, fence, ended = [], {}, False
    for record in log:
        if ended and not resume:
            wrongs.append(f"without resume=True the run went on past an end: {record}")
        if isinstance(record, Rollback):
            fence, ended = record.fence, True
            continue
        late = [member for member in record.members if member.epoch <= fence.get(member.rank, 0)]
        if late:
            wrongs.append(f"incarnations from before an end went past it: {late}")
    lost = [error for error in outcome.results.values() if isinstance(error, ReplicaLostError)]
    if lost and not ended:
        wrongs.append(f"a rank was given up, and the log does not say so: {lost}")
    return wrongs
