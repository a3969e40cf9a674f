"""What is compared, and on which links. A new row of the table is one line in :data:`ROWS`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        name: By which its results are kept.
        label: What the table says.
        kind: ``"diloco"``; ``"synchronous"``: the replicas average their gradients at every step;
            ``"alone"``: one replica.
        against: The row whose loss this one's is compared with, if any.
        within: By which share its loss may be above that of ``against``: the goal.
        fewer: How many times fewer bytes it should move than the row that it is compared with.
        fragments: As for :class:`DiLoCo`.
        delay: The delay as a part of the period P between two syncs, from 0 to less than 1.
        alpha: As for :class:`DiLoCo`.
        codec: As for :class:`DiLoCo`.
        publish_every: As for :func:`connect`: once in so many syncs the state is published, in the
            gather topology.
        more: Further arguments of :class:`DiLoCo`, such as ``{"error_feedback": True}``; what JSON
            can hold.
    """

    name: str
    label: str
    kind: str = "diloco"
    against: str | None = None
    within: float | None = None
    fewer: float | None = None
    fragments: int = 1
    delay: float = 0.0
    alpha: float = 0.0
    codec: str = "plain"
    publish_every: int = 4
    more: Mapping[str, Any] = field(default_factory=dict)

    def options(self, sync_every: int) -> dict[str, Any]:
        """The arguments of :class:`DiLoCo` where each fragment is synced once in so many steps."""
        delay = round(self.delay * sync_every / self.fragments)
        return {
            "sync_every": sync_every,
            "fragments": self.fragments,
            "delay": delay,
            "alpha": self.alpha,
            "codec": self.codec,
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under what the time is measured.

    Attributes:
        bandwidth: Bytes per second of a replica's link, in each direction.
        latency: Seconds that a request takes besides its bytes.
        step: Seconds of an inner step.
        rounds: How many times H inner steps are measured, after ``warm`` times as a warm-up.
        warm: Rounds before those that are measured.
        over: What stands behind the link: ``"folder"``, or ``"s3"`` for moto's S3 over HTTP.
    """

    bandwidth: float
    latency: float = 0.02
    step: float = 0.125
    rounds: int = 4
    warm: int = 1
    over: str = "folder"


_SPARSE = {"outer_lr": 1.0, "outer_momentum": 0.0, "error_feedback": 0.95}
"""What SparseLoCo goes with."""

ROWS = (
    Row("synchronous", "gradients averaged at every step", "synchronous"),
    Row("alone", "one replica alone", "alone"),
    Row("plain", "DiLoCo"),
    Row("int8", "8 bits (int8)", against="plain", within=0.01, codec="int8"),
    Row("e2m1", "4 bits (e2m1)", against="plain", within=0.01, codec="e2m1"),
    Row("topk128", "sparse (topk128), lr 1, momentum 0", against="plain", within=0.03,
        codec="topk128", more=_SPARSE),
    Row("topk64", "sparse (topk64), likewise, state every 16th sync", against="plain", within=0.03,
        fewer=50, codec="topk64", publish_every=16, more=_SPARSE),
    Row("both-int8", "8 bits in both directions", against="plain", within=0.01, codec="int8",
        more={"state_codec": "int8"}),
    Row("mixed", "alpha 1/2", alpha=0.5),
    Row("delay", "alpha 1/2, delay P/2", against="mixed", within=0.01, delay=0.5, alpha=0.5),
    Row("delay-e2m1", "alpha 1/2, delay P/2, e2m1", against="delay", within=0.01, delay=0.5,
        alpha=0.5, codec="e2m1"),
    Row("streaming", "4 fragments, alpha 1/2, delay P/2", against="mixed", within=0.01, fragments=4,
        delay=0.5, alpha=0.5),
)  # fmt: skip
"""The rows of the table."""

LINKS = {
    "slow": Conditions(1e6),
    "s3": Conditions(1e6, over="s3"),
    "fast": Conditions(8e6),
}
"""The links on which the time is measured."""
