"""How an elastic run behaves."""

from __future__ import annotations

from dataclasses import dataclass

from ._errors import ConfigurationError

_FAR_GATHER_BYTES = 8 * 2**30


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
        resume: Go on with the run that the prefix holds, whichever launch began it.
    """

    min_replicas: int
    grace: float = 60.0
    late: str = "carry"
    topology: str = "auto"
    publish_every: int = 4
    retention: int = 2
    resume: bool = False

    def check(self, world_size: int, sync_timeout: float) -> None:
        """Refuse what is impossible.

        Raises:
            ConfigurationError: It names the setting, what was given and what is allowed.
        """
        if not isinstance(self.min_replicas, int) or not 1 <= self.min_replicas <= world_size:
            raise ConfigurationError(
                f"min_replicas must be one of 1 … {world_size} (world_size is {world_size}), not {self.min_replicas!r}: "
                "a larger quorum could never be reached"
            )
        if not 0 < self.grace < sync_timeout:
            raise ConfigurationError(
                f"grace must be positive and less than sync_timeout ({sync_timeout:g} s), not {self.grace!r} s: "
                "a sync would fail before it could go on without a late replica"
            )
        if self.late not in {"carry", "drop"}:
            raise ConfigurationError(f"late must be 'carry' or 'drop', not {self.late!r}")
        if self.topology not in {"auto", "sharded", "gather"}:
            raise ConfigurationError(f"topology must be 'auto', 'sharded' or 'gather', not {self.topology!r}")
        for name in ("publish_every", "retention"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r}")


def choose_topology(asked: str, *, state_bytes: int, world_size: int, near: bool) -> str:
    """The topology of a new run.

    Gather saves a round trip per sync and the publication of the state, but every replica reads every contribution and
    keeps all of the outer state. By the model of S3-like stores the two meet at about 8 GiB read per replica and sync. On
    a store whose requests cost nothing, sharded is never slower.

    Args:
        asked: ``auto``, ``sharded`` or ``gather``.
        state_bytes: Size of one contribution in bytes.
        world_size: Number of replicas.
        near: Whether requests cost microseconds.
    """
    if asked != "auto":
        return asked
    return "gather" if not near and (world_size - 1) * state_bytes <= _FAR_GATHER_BYTES else "sharded"
