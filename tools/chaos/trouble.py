"""What happens to the processes of a run: who is killed or stopped, when, and for how long."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from cohort import Cohort, Incarnation

_LONGEST_STOP = 10.0
_SHORTEST_STOP = 0.5


@dataclass
class Trouble:
    """Disturbs a cohort from time to time, one rank at a time except where all are killed at once.

    Attributes:
        chance: Chooses when, whom and for how long.
        grace: The run's grace; a process is stopped for half of it up to ten times as long.
        kill_every: Seconds between two kills on average; 0 for none.
        stop_every: Seconds between two stops on average; 0 for none.
        damage_every: Seconds on average between two times that all are killed and an object is
            damaged; 0 for none.
        damage: How that is done.
        counts: How often what happened.
    """

    chance: random.Random
    grace: float
    kill_every: float
    stop_every: float
    damage_every: float
    damage: Callable[[], None]
    counts: dict[str, int] = field(default_factory=dict)
    _next: dict[str, float] = field(default_factory=dict)
    _hasty: dict[str, bool] = field(default_factory=dict)
    _awaited: list[tuple[float, int]] = field(default_factory=list)

    def act(self, cohort: Cohort) -> None:
        """Do what is due now. To be called often."""
        now = time.monotonic()
        for moment, rank in [entry for entry in self._awaited if entry[0] <= now]:
            self._awaited.remove((moment, rank))
            self._count("second incarnations")
            cohort.start(rank)
        for what, every, do in (
            ("kill", self.kill_every, self._kill),
            ("stop", self.stop_every, self._stop),
            ("damage", self.damage_every, self._damage),
        ):
            if not every:
                continue
            due = self._next.setdefault(what, now + every * self.chance.uniform(0.2, 0.6))
            if now >= due and self._may(cohort, what):
                self._next[what] = now + every * self.chance.uniform(0.7, 1.3)
                self._hasty.pop(what, None)
                do(cohort)

    @property
    def enough(self) -> bool:
        """Whether everything that was asked for has happened at least once."""
        asked = {
            "kills": self.kill_every,
            "second incarnations": self.stop_every,
            "damages": self.damage_every,
        }
        return all(name in self.counts for name, every in asked.items() if every)

    def let_go(self, cohort: Cohort) -> bool:
        """Begin nothing more; whether nothing that was begun is still to be done."""
        self.kill_every = self.stop_every = self.damage_every = 0.0
        self.act(cohort)
        return not self._awaited

    def _may(self, cohort: Cohort, what: str) -> bool:
        """Say if all ranks are there, so that a quorum is left; mostly, they are well under way.

        So the run makes progress.
        """
        there = [incarnation for incarnation in cohort.current.values() if self._awake(incarnation)]
        if len(there) < cohort.replicas or (what != "kill" and cohort.zombies):
            return False
        self._hasty.setdefault(what, self.chance.random() < 0.2)
        return (self._hasty[what] and what == "kill") or cohort.has_synced()

    def _kill(self, cohort: Cohort) -> None:
        if "kills" in self.counts and self.chance.random() < 0.15:
            self._count("kills of all")
            for incarnation in list(cohort.current.values()):
                cohort.kill(incarnation)
            return
        self._count("kills")
        cohort.kill(cohort.current[self.chance.randrange(cohort.replicas)])

    def _damage(self, cohort: Cohort) -> None:
        """While all sleep, damage an object; then kill them, and their successors must read it."""
        self._count("damages")
        for incarnation in list(cohort.current.values()):
            cohort.stop(incarnation, 1e9, 0)
        self.damage()
        for incarnation in list(cohort.current.values()):
            cohort.kill(incarnation)

    def _stop(self, cohort: Cohort) -> None:
        victim = cohort.current[self.chance.randrange(cohort.replicas)]
        seconds = (
            self.grace * _SHORTEST_STOP * (_LONGEST_STOP / _SHORTEST_STOP) ** self.chance.random()
        )
        self._count("stops")
        if "second incarnations" in self.counts and self.chance.random() < 0.25:
            cohort.stop(victim, seconds, 0)
            return
        # A second incarnation begins while it sleeps, or just after it has woken up. Often it
        # sleeps until that one is well under way: only then does the zombie wake up in a world that
        # has gone on without it.
        wake_after = self.chance.choice([0, 0, 1, 3, 6])
        cohort.stop(victim, seconds, wake_after)
        latest = 0.8 * seconds if wake_after else 1.1 * seconds
        self._awaited.append((time.monotonic() + self.chance.uniform(0, latest), victim.rank))

    @staticmethod
    def _awake(incarnation: Incarnation) -> bool:
        return (
            incarnation.status is None
            and incarnation.pid is not None
            and incarnation.wake_at is None
        )

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
