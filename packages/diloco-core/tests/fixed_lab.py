"""Random schedules of runs with fixed membership, in virtual time, and what is wrong with them."""

import random

from diloco_core._run._settings import Fixed
from diloco_core.testing import (
    Fault,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    broken_promises,
    simulate,
    violations,
)

LOST_AFTER = 90.0
#: A hung process is taken for dead and goes on all the same: what was started in its place may come after its end.
LATE = "has left the run"


def wrong(schedule, training, *, resume=False, **options):
    """What is wrong with a run, and what became of it."""
    store, broken = SimulatedStore(), []
    store.after_delete = lambda keys: broken.extend(broken_promises(store, keys))
    settings = Fixed(schedule.world_size, LOST_AFTER, resume)
    outcome = simulate(training, schedule, settings, store=store, **options)
    found = [what for what in violations(outcome, training) if LATE not in what]
    return found + broken, outcome


def random_run(seed, kinds):
    """What is wrong with a run whose faults are of these kinds."""
    chance = random.Random(seed)
    size = chance.randint(2, 3)
    faults = [
        Fault(
            chance.randrange(size),
            chance.randint(1, 2),
            chance.randint(1, 100),
            chance.choice(kinds),
            chance.choice([60.0, 120.0, 300.0]),
        )
        for _ in range(chance.randint(2, 6))
    ]
    schedule = Schedule(size, seed=seed, faults=faults, restart_after=chance.choice([0.1, 5.0]))
    return wrong(schedule, SimulatedTraining(4, (40,), 2))[0]
