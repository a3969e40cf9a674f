"""How an elastic run behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .._checks import check_positive, check_whole
from .._errors import ConfigurationError
from .._planner._plan import USUAL_BANDWIDTH, plan_exchange

if TYPE_CHECKING:
    from .._store._transfer import Transfer


@dataclass(frozen=True, slots=True)
class Elastic:
    """Settings of elastic membership.

    Attributes:
        min_replicas: How many replicas must contribute to a sync; below that nothing is decided.
        grace: Seconds to wait for a replica that is late, counted from the own contribution. After it a sync is committed
            without it, and the shards of an owner that is late are updated by others.
        late: ``"carry"``: a contribution that came too late goes into the next sync. ``"drop"``: it is forgotten.
        topology: ``"sharded"``, ``"gather"``, or ``"auto"`` for what suits the size of the model and of the run.
        publish_every: In the gather topology, every how many syncs of a fragment its state is published.
        retention: How many syncs a replica may lag without having to reload.
        resume: Go on with the run that the prefix holds, whichever launch began it. ``"newest-whole"`` also agrees to going
            back: where the newest state is damaged and nothing can make it again, the run goes on from the newest states that
            are whole, says in the log which syncs are given up, and stops lives that have not agreed.
    """

    min_replicas: int
    grace: float = 60.0
    late: str = "carry"
    topology: str = "auto"
    publish_every: int = 4
    retention: int = 2
    resume: bool | Literal["newest-whole"] = False

    def check(self, world_size: int, sync_timeout: float) -> None:
        """Refuse what is impossible.

        Raises:
            ConfigurationError: It names the setting, what was given and what is allowed.
        """
        whole = isinstance(self.min_replicas, int) and not isinstance(self.min_replicas, bool)
        if not whole or not 1 <= self.min_replicas <= world_size:
            raise ConfigurationError(
                f"min_replicas must be one of 1 … {world_size} (world_size is {world_size}), not {self.min_replicas!r}: "
                "a larger quorum could never be reached"
            )
        check_positive("grace", self.grace, " of seconds")
        if self.grace >= sync_timeout:
            raise ConfigurationError(
                f"grace must be less than sync_timeout ({sync_timeout:g} s), not {self.grace!r} s: "
                "a sync would fail before it could go on without a late replica"
            )
        allowed = {
            "late": ("carry", "drop"),
            "topology": ("auto", "sharded", "gather"),
            "resume": (False, True, "newest-whole"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                *some, last = map(repr, values)
                raise ConfigurationError(
                    f"{name} must be {', '.join(some)} or {last}, not {value!r}"
                )
        for name in ("publish_every", "retention"):
            check_whole(name, getattr(self, name))


def choose_topology(
    asked: str,
    *,
    state_bytes: int,
    world_size: int,
    publish_every: int,
    near: bool,
    transfer: Transfer | None = None,
    outer_state: float = 1.0,
) -> str:
    """The topology of a new run: on S3-like stores the quicker one by :func:`plan_exchange`.

    Gather saves round trips and most publications of the state, but every replica reads every contribution and keeps all of
    the outer state: it suits small models and few replicas. The faster the network, the larger the runs that it suits; it is
    not known here, so a modest one is assumed. On a store whose requests cost nothing, sharded is never slower.

    Args:
        asked: ``auto``, ``sharded`` or ``gather``.
        state_bytes: Size of one contribution in bytes.
        world_size: Number of replicas.
        publish_every: Every how many syncs the state is published in the gather topology.
        near: Whether requests cost microseconds.
        transfer: How the replica that begins the run reads and writes; the usual way if left out.
        outer_state: Tensors that the outer optimizer keeps of every parameter.
    """
    if asked != "auto":
        return asked
    if near:
        return "sharded"
    params = max(state_bytes / 4, 1)
    return plan_exchange(
        params,
        world_size,
        USUAL_BANDWIDTH,
        outer_state=outer_state,
        publish_every=publish_every,
        transfer=transfer,
    ).topology
