"""Which fragment is sent, and which is adopted, after which inner step.

Pure: it counts nothing itself.

For schedules in seconds, see :mod:`._windows`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._seconds import Seconds


@dataclass(frozen=True, slots=True)
class Due:
    """What has to be done after an inner step; sending comes first.

    Attributes:
        send: Whether the contribution of the fragment whose turn it is has to be sent.
        adopt: Whether the sync of that fragment has to be finished and its result adopted.
    """

    send: bool
    adopt: bool


class Turns:
    """What all schedules have in common: the fragments take turns.

    Attributes:
        sync_every: Inner steps, or seconds, between two syncs of the same fragment.
        fragments: F, the number of fragments.
        delay: tau, inner steps between sending and adopting.
        alpha: How much of its own values a replica keeps when it adopts a sync, from 0 (nothing) to
            1 (everything).
    """

    __slots__ = ()

    sync_every: int | Seconds
    fragments: int
    delay: int
    alpha: float

    @property
    def seconds(self) -> float:
        """The seconds of a window; 0 if replicas contribute after a number of inner steps."""
        return 0.0

    @property
    def settings(self) -> dict[str, str]:
        """Delay and alpha by name, where they are not 0; all replicas must have them in common."""
        given = {"delay": self.delay, "alpha": self.alpha}
        return {name: repr(value) for name, value in given.items() if value}

    def turn(self, decisions: int) -> int:
        """Return which fragment is synced next.

        Args:
            decisions: How many syncs the run has decided, including those that it gave up later.
                This makes all replicas agree on the turn by the run's log alone.
        """
        return decisions % self.fragments


@dataclass(frozen=True, slots=True)
class Schedule(Turns):
    """Fragments synced in turn, at equal intervals, each once per ``sync_every`` inner steps.

    So one fragment is synced in every period of P = ``sync_every / fragments`` inner steps. Its
    contribution is sent ``delay`` steps before the end of the period, and the result is adopted at
    the end, so that the replica trains while the sync is under way (Streaming DiLoCo, arXiv
    2501.18512, section 2.2, where the delay is called tau). Periods are counted from the last
    adoption, not from the start: a sync that comes late shifts those that follow.

    Attributes:
        sync_every: H, inner steps between two syncs of the same fragment.
        fragments: F, the number of fragments; divides H.
        delay: tau, inner steps between sending and adopting; less than P.
        alpha: How much of its own values a replica keeps when it adopts a sync, from 0 (nothing) to
            1 (everything).
    """

    sync_every: int
    fragments: int
    delay: int = 0
    alpha: float = 0.0

    @property
    def steps(self) -> int:
        """Return how many inner steps lie between two syncs of a fragment."""
        return self.sync_every

    @property
    def period(self) -> int:
        """P: inner steps between two adoptions, of any fragments."""
        return self.sync_every // self.fragments

    @property
    def length(self) -> str:
        """Return how messages name a period."""
        return f"{self.period} inner steps"

    # What a schedule in seconds goes by
    def came_after(self, steps: int, elapsed: float) -> str:  # noqa: ARG002
        """Return the time since the last sync for messages, given its inner steps and seconds."""
        return f"{steps}"

    def due(self, since_adoption: int, *, sent: bool = False, half_taken: bool = False) -> Due:
        """Return what has to be done after an inner step.

        Args:
            since_adoption: Inner steps since the last adoption of any fragment.
            sent: Whether the fragment whose turn it is has been sent since.
            half_taken: Whether some of several inner optimizers have already taken their next step.
                A sync would drop the gradients that the others still need for it, so it waits for
                them; but for at most one period, since an optimizer may never step again.
        """
        end = 2 * self.period if half_taken else self.period
        send = not sent and since_adoption >= end - self.delay
        return Due(send, since_adoption >= end)
