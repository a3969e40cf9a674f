"""Decide which fragment is sent, and which is adopted, after which inner step or second.

Pure: nothing is counted here, and no clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._seconds import Seconds

MANY_STEPS = 100
_LOOKS = 20  # in a window


@dataclass(frozen=True, slots=True)
class Due:
    """Say what has to be done after an inner step; sending comes first.

    Attributes:
        send: Whether the contribution of the fragment whose turn it is has to be sent.
        adopt: Whether the sync of that fragment has to be finished and its result adopted.
    """

    send: bool
    adopt: bool


@dataclass(frozen=True, slots=True)
class Turns:
    """Let the fragments take turns, as all schedules do.

    Attributes:
        sync_every: Inner steps, or seconds, between two syncs of the same fragment.
        fragments: F, the number of fragments.
        delay: tau, inner steps between sending and adopting.
        alpha: How much of its own values a replica keeps when it adopts a sync, from 0 (nothing) to
            1 (everything).
    """

    sync_every: int | Seconds
    fragments: int
    delay: int = 0
    alpha: float = 0.0

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
        sync_every: H, inner steps between two syncs of the same fragment; a multiple of the number
            of fragments, and more than ``delay`` for each of them.
    """

    sync_every: int

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

    def due_in(self, since_adoption: int, *, sent: bool) -> int:
        """Return after how many more inner steps something has to be done; at least 1."""
        return max(1, self.period - (0 if sent else self.delay) - since_adoption)


@dataclass(frozen=True, slots=True)
class Windows(Turns):
    """Fragments synced in turn, at equal intervals, each once in ``sync_every`` seconds.

    A *window* lasts T/F seconds, of which each replica makes as many inner steps as it can. It
    begins when the replica sees the record of the last sync, or has loaded the run's state, by its
    own monotonic clock. All replicas see that record at about the same time, so windows that begin
    there stay together. If they began at each replica's own contribution, or where it adopts a
    sync, every difference between replicas would stay and add to the next one.

    A fragment is sent at the first boundary between two inner steps at which the window is over,
    the sync before is adopted and at least one step was taken since then. The result is adopted
    ``delay`` steps later.

    Attributes:
        sync_every: T, the time between two syncs of the same fragment.
    """

    sync_every: Seconds

    @property
    def seconds(self) -> float:
        """The length of a window."""
        return self.sync_every.value / self.fragments

    @property
    def steps(self) -> int:
        """Return how many inner steps without a sync are many, where only steps are counted."""
        return MANY_STEPS

    @property
    def length(self) -> str:
        """Return how messages name a window."""
        return f"{self.seconds:g} s"

    # What a schedule in steps goes by
    def came_after(self, steps: int, elapsed: float) -> str:  # noqa: ARG002
        """Return the time since the last sync for messages, given its inner steps and seconds."""
        return f"{elapsed:.3g} s"

    def due(
        self, elapsed: float, *, since_sent: int | None = None, half_taken: bool = False
    ) -> Due:
        """Return what has to be done after an inner step that follows an adoption.

        Args:
            elapsed: Seconds since the window began.
            since_sent: Inner steps since the fragment whose turn it is was sent; None if it has not
                been sent.
            half_taken: Whether some of several inner optimizers have already taken their next step.
                As with a schedule in steps, a sync waits for the others, but not after two windows.
        """
        wait = half_taken and elapsed < 2 * self.seconds
        if since_sent is not None:
            return Due(send=False, adopt=since_sent >= self.delay and not wait)
        send = elapsed >= self.seconds and not wait
        return Due(send, adopt=send and not self.delay)

    def may_look(self, since_looked: float) -> bool:
        """Say whether a replica looks, in the middle of its window, for a sync without it.

        Only one that the others do not expect does. It came late or was away, so its window ends at
        another time than theirs. Without looking it would see the next record only at the end of
        its own window, and come closer to the others by no more than a grace with every sync.

        Args:
            since_looked: Seconds since it looked last, or since the window began.
        """
        return since_looked >= self.seconds / _LOOKS

    def late(self, elapsed: float, since_adoption: int) -> bool:
        """Say whether a replica is so slow that it is late by a window or more.

        One step, or the sync before it, has taken that much longer than there was time.

        Args:
            elapsed: Seconds since the window began, when the fragment is sent.
            since_adoption: Inner steps since the last adoption of any fragment.
        """
        return since_adoption == 1 and elapsed >= 2 * self.seconds
