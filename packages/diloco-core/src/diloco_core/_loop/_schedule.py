"""After which inner step which fragment is sent, and after which it is adopted. Pure: it counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done after an inner step; sending comes first.

    Attributes:
        send: The fragment whose turn it is sends its contribution.
        adopt: Its sync is finished: what the replicas have come to is adopted.
    """

    send: bool
    adopt: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """When fragments are synced: in turn, at equal distances, each once per ``sync_every`` inner steps.

    So one fragment is synced in every period of P = ``sync_every / fragments`` inner steps. It is sent ``delay`` steps before
    the end of the period, and adopted at the end, so that the sync goes on while the replica trains (Streaming DiLoCo,
    arXiv 2501.18512, section 2.2, where the delay is called tau). Periods are counted from the last adoption, not from
    the start: a sync that came late shifts those that follow.

    Attributes:
        sync_every: H, inner steps between two syncs of the same fragment.
        fragments: F, how many fragments there are; divides H.
        delay: tau, inner steps between sending and adopting, less than P. The outer loop has none as yet.
        alpha: How much of what a replica holds is kept where a sync is adopted, from 0 (none of it) to 1.

    Raises:
        ValueError: These numbers make no schedule.
    """

    sync_every: int
    fragments: int
    delay: int = 0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.fragments < 1 or self.sync_every < 1 or self.sync_every % self.fragments:
            raise ValueError(
                f"sync_every ({self.sync_every}) must be a positive multiple of fragments ({self.fragments})"
            )
        if not 0 <= self.delay < self.period:
            raise ValueError(
                f"delay is {self.delay}, but must be at least 0 and less than the period of {self.period} inner steps"
            )
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha is {self.alpha}, but must be from 0 to 1")

    @property
    def period(self) -> int:
        """P: inner steps between two adoptions, of whichever fragments."""
        return self.sync_every // self.fragments

    def offset(self, fragment: int) -> int:
        """After how many inner steps a fragment is adopted for the first time."""
        return (fragment + 1) * self.period

    def turn(self, decisions: int) -> int:
        """Which fragment is synced next.

        Args:
            decisions: How many syncs the run has decided, those that it gave up later among them: like this all replicas
                agree on it by the run's log alone.
        """
        return decisions % self.fragments

    def due(self, since_adoption: int, *, sent: bool = False, half_taken: bool = False) -> Due:
        """What is to be done after an inner step.

        Args:
            since_adoption: Inner steps since the last adoption of any fragment.
            sent: Whether the fragment whose turn it is has been sent since.
            half_taken: Whether some of several inner optimizers have taken their next step already. What the others are
                still to step by would be dropped by a sync, so that it waits for them: but for one period at most, as
                an optimizer may never step again.
        """
        end = 2 * self.period if half_taken else self.period
        send = not sent and since_adoption >= end - self.delay
        return Due(send, since_adoption >= end)
