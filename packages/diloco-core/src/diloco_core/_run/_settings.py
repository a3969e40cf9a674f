"""The settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from .._checks import check_positive, check_resume, one_of, whole
from .._errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Elastic:
    """Settings of elastic membership.

    Attributes:
        min_replicas: How many replicas must contribute to a sync; with fewer, it is not decided.
        grace: Seconds to wait for a replica that is late, counted from this replica's own
            contribution. After that, a sync is committed without the late replica, and if an owner
            of shards is late, others update its shards.
        late: What becomes of a contribution that came too late: ``"carry"`` adds it to the next
            sync, ``"drop"`` discards it.
        topology: ``"sharded"``, ``"gather"``, or ``"auto"`` for the one that suits the size of the
            model and of the run.
        publish_every: In the gather topology, the number of syncs of a fragment from one
            publication of its state to the next; 4 if left out. Where ``"auto"`` chooses the
            sharded topology, it is refused when the run begins.
        retention: How many syncs a replica may lag behind without having to reload.
        resume: True to continue the run that the prefix holds, whichever launch began it.
            ``"newest-whole"`` also allows the run to go back: if the newest state is damaged and
            cannot be made again, the run continues from the newest states that are whole. The log
            says which syncs are given up. Incarnations that have not agreed to going back are
            stopped.

    Raises:
        ConfigurationError: A setting is not allowed. The message names it and what is allowed.
    """

    fixed: ClassVar[bool] = False
    return_within: ClassVar[float] = 0.0  # the others go on
    decides: ClassVar[bool] = True

    min_replicas: int
    grace: float = 60.0
    late: str = "carry"
    topology: str = "auto"
    publish_every: int | None = None
    retention: int = 2
    resume: bool | Literal["newest-whole"] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_replicas", whole("min_replicas", self.min_replicas))
        check_positive("grace", self.grace, " of seconds")
        one_of("late", self.late, ("carry", "drop"))
        one_of("topology", self.topology, ("auto", "sharded", "gather"))
        check_resume(self.resume)
        whole("publish_every", self.published_every)
        whole("retention", self.retention)
        self.check_chosen(self.topology)

    @property
    def published_every(self) -> int:
        """As ``publish_every``, also if that was left out."""
        return 4 if self.publish_every is None else self.publish_every

    def check(self, world_size: int, sync_timeout: float) -> None:
        """Refuse settings that do not fit a run of this size and with this timeout in seconds.

        Raises:
            ConfigurationError: The message names the setting, what was given and what is allowed.
        """
        if self.min_replicas > world_size:
            raise ConfigurationError(
                f"min_replicas must be at most world_size ({world_size}), not {self.min_replicas}: "
                "a larger quorum could never be reached. Start more replicas, or ask for fewer."
            )
        if self.grace >= sync_timeout:
            raise ConfigurationError(
                f"grace must be less than sync_timeout ({sync_timeout:g} s), but it is "
                f"{self.grace:g} s (60 s if left out): a sync would fail before it could continue "
                "without a late replica. Pass a smaller grace, or a larger sync_timeout"
            )

    def check_chosen(self, topology: str) -> None:
        """Refuse ``publish_every`` where the topology publishes the state in every sync.

        That is the topology which was asked for, or which ``auto`` has chosen.

        Raises:
            ConfigurationError: The message says what was given and what to do.
        """
        if self.publish_every is not None and topology == "sharded" and self.topology != "gather":
            chosen = ", which topology='auto' has chosen," if self.topology == "auto" else ""
            raise ConfigurationError(
                f"publish_every={self.publish_every} cannot be used with "
                f"topology='sharded'{chosen} since that publishes the state in every sync. Leave "
                "publish_every out, or pass topology='gather'"
            )


@dataclass(frozen=True, slots=True)
class Fixed:
    """The settings of fixed membership, where all ranks are in every sync.

    They have the names of :class:`Elastic`.

    Attributes:
        min_replicas: All ranks.
        grace: Seconds between two checks that the prefix still belongs to the run, and of waiting
            for others to repair something.
        resume: As in :class:`Elastic`.
        return_within: Seconds that the others wait for a rank that is lost, or has failed, to be
            started again. 0: not at all.
        decides: Whether the store decides which of two processes creates an object, so that a rank
            can come back.
    """

    fixed: ClassVar[bool] = True
    late: ClassVar[str] = "drop"
    topology: ClassVar[str] = "sharded"
    publish_every: ClassVar[None] = None
    published_every: ClassVar[int] = 1
    retention: ClassVar[int] = 2

    min_replicas: int
    grace: float
    resume: bool | Literal["newest-whole"] = False
    return_within: float = 300.0
    decides: bool = True

    def check_chosen(self, topology: str) -> None:
        """Accept everything: there is one topology."""


Settings: TypeAlias = Elastic | Fixed


@dataclass(frozen=True, slots=True)
class Joiner:
    """A replica that joins a run: who it is, and what it was given.

    Attributes:
        rank: Its rank.
        world_size: How many ranks there may be.
        run_id: The launch to which it belongs.
        settings: How membership behaves.
        chunk_bytes: Size of its buffers.
    """

    rank: int
    world_size: int
    run_id: str
    settings: Settings
    chunk_bytes: int
