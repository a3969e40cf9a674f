"""When fragments are sent and adopted if ``sync_every`` is a time. Pure: it reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

from .._seconds import Seconds
from ._schedule import Due, Turns

_MANY_STEPS = 100
_LOOKS = 20  # in a window


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
        fragments: F, the number of fragments.
        delay: tau, inner steps between sending and adopting.
        alpha: How much of its own values a replica keeps when it adopts a sync, from 0 (nothing) to
            1 (everything).
    """

    sync_every: Seconds
    fragments: int
    delay: int = 0
    alpha: float = 0.0

    @property
    def seconds(self) -> float:
        """The length of a window."""
        return self.sync_every.value / self.fragments

    @property
    def steps(self) -> int:
        """Return how many inner steps without a sync are many, where only steps are counted."""
        return _MANY_STEPS

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
