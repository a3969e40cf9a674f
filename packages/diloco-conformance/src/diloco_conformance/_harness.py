"""What a backend supplies to be checked: a world, and a hand that moves it behind the executor's back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco_protocol import Backoff, BaseExecutor, ReplicaHandle

from ._time import VirtualTime
from ._words import Ability, Fault, Operation, Step, Told, Truth
from ._world_hooks import WorldHooks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ability", "Fault", "Harness", "Operation", "Step", "Told", "Truth"]


class Harness(WorldHooks, ABC):
    """One fresh world for one example.

    ``docs/harness.md`` has the duties of every method in a table.

    A scripted world is quick and has faults; one with real replicas proves that the script is true.
    Most backends have both. All methods return only when what they do is done and the backend's own
    records show it, except that a cancel and what follows of it may be under way until
    :meth:`settle`.

    Attributes:
        entrypoint: What is launched; in a world with real replicas that of :class:`Puppets`.
        entrypoint_args: Arguments that the world needs itself; the suite adds its own.
        cannot: What this world cannot do (a Step, Fault, Operation or Ability), and why. The tests
            that need it are skipped with that reason.
        starts_by_itself: Whether replicas start without being driven: START only waits until they
            have, and PREEMPT until they have again.
        timeout: Timeout of most launches, in seconds; no test reaches it.
        short_timeout: Timeout of the replicas that are to be overdue, in seconds.
        overrun: Seconds beyond it after which they must have been ended, or be about to.
        slack: Seconds by which collect may come back late.
        resolution: Seconds by which the times in the backend's records may be off.
        patience: Real seconds that one call may take before it counts as hung; 30 if it is not set,
            or 5 where time is virtual (:meth:`sleep` is not overridden), since nothing waits in
            real time there.
        many_ranks: How many replicas a large run of the suite has; more than ten, unless that is
            too much for this world.
        many_runs: How many runs are more than one page of the backend's lists, or as many as this
            world can bear.
        long_log: How many bytes are more than the platform gives of a log in one page, or as many
            as this world can bear.
        keeps_carriage_returns: Whether a carriage return right before a newline is kept in logs;
            containerd drops it.
        gpus: Some values of ``gpu=`` that this backend takes, such as ``"H100:2"``; none if it has
            no GPUs.
        run_prefix: Begin of the run_ids that the suite gives; where runs outlive a world, it must
            be new each time.
        time: The clock of the world, if it is virtual.
    """

    entrypoint: str
    entrypoint_args: Mapping[str, Any] = {}
    cannot: Mapping[str, str] = {}
    starts_by_itself: bool = False
    timeout: float = 3600.0
    short_timeout: float = 60.0
    overrun: float = 5.0
    slack: float = 1.0
    resolution: float = 1.0
    patience: float
    many_ranks: int = 12
    many_runs: int = 12
    long_log: int = 1_300_000
    keeps_carriage_returns: bool = True
    gpus: Sequence[str] = ()
    run_prefix: str = "conf"

    def __init__(self) -> None:
        self.time = VirtualTime()
        if not hasattr(self, "patience"):
            self.patience = 5.0 if type(self).sleep is Harness.sleep else 30.0

    # --- what every backend supplies ---

    @abstractmethod
    def make_executor(self, **options: Any) -> BaseExecutor:
        """A new executor on this world that has no memory of earlier ones, with ``backoff=self.backoff()``.

        ``options`` are for its constructor: none, or some of ``env``, ``journal`` and ``run_id``.
        """

    @abstractmethod
    def drive(self, handle: ReplicaHandle, step: Step, value: Any = None) -> None:
        """Make a replica do something, behind the executor's back."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything that is under way come to its end: cancels, gang failures, timeouts that are over, lagging records."""

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Let time pass (``self.time.sleep``), with all that the world does then by itself, such as timeouts."""

    @abstractmethod
    def truth(self, handle: ReplicaHandle) -> Truth:
        """What is true of a replica."""

    @abstractmethod
    def living(self) -> int:
        """How many replicas are alive in this world, whoever started them."""

    # --- what a world may declare that it cannot ---

    def expire(self, handles: Sequence[ReplicaHandle]) -> None:
        """Make the backend forget a run that has ended, as after its retention."""
        raise NotImplementedError(
            f"{type(self).__name__} has no expire(); declare Ability.EXPIRE in cannot"
        )

    def age(self, seconds: float) -> None:
        """Let days pass, with all that the backend does then by itself, such as forgetting runs after its retention."""
        raise NotImplementedError(
            f"{type(self).__name__} has no age(); declare Ability.AGE in cannot"
        )

    def elsewhere(self) -> BaseExecutor:
        """An executor of the same backend on another account, cluster or host, which has never seen this one's replicas."""
        raise NotImplementedError(
            f"{type(self).__name__} has no elsewhere(); declare Ability.ELSEWHERE in cannot"
        )

    def inject(self, operation: Operation, fault: Fault, *, after: int = 0) -> None:
        """Disturb all calls of an operation, except the first ``after``, until :meth:`clear`; several operations add up."""
        raise NotImplementedError(
            f"{type(self).__name__} has no inject(); declare the Faults in cannot"
        )

    def clear(self) -> None:
        """End all disturbances."""

    def calls(self) -> int:
        """How many calls the backend has received so far."""
        raise NotImplementedError(
            f"{type(self).__name__} has no calls(); declare Ability.CALLS in cannot"
        )

    def sent(self) -> list[dict[str, Any]]:
        """The requests of all launches so far, as the platform got them, in the words of ``Plan.requests``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no sent(); declare Ability.SENT in cannot"
        )

    def told(self, handle: ReplicaHandle) -> Told:
        """What a replica that runs was told; ``DILOCO_ATTEMPT`` in its environment is the attempt that runs."""
        raise NotImplementedError(
            f"{type(self).__name__} has no told(); declare Ability.TOLD in cannot"
        )

    def write(self, handle: ReplicaHandle, data: bytes, stream: str = "stdout") -> None:
        """Make a replica's program write these very bytes to ``"stdout"`` or ``"stderr"``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no write(); declare Ability.WRITE in cannot"
        )

    def secret(self, value: str) -> str:
        """Keep a secret in the backend's store, and give the reference that a launch takes.

        The same with ``-missing`` behind it refers to nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no secret(); declare Ability.SECRETS in cannot"
        )

    def labels(self, handle: ReplicaHandle) -> Mapping[str, str]:
        """The labels that the backend's own records have of a replica, or of its run."""
        raise NotImplementedError(
            f"{type(self).__name__} has no labels(); declare Ability.LABELS in cannot"
        )

    def close(self) -> None:
        """Let go of the world; nothing of it may be left running."""

    def now(self) -> float:
        """The time in Unix seconds by which the backend dates its records; override it if it is not the clock."""
        return self.clock() if type(self).sleep is Harness.sleep else time.time()

    # --- for use in make_executor ---

    def clock(self) -> float:
        """The world's time in seconds; override it where it is real."""
        return self.time.clock()

    def sleep(self, seconds: float) -> None:
        """What executors on this world sleep with: the world goes on meanwhile.

        Override it where time is real.
        """
        if not self.time.idle():
            self.advance(seconds)

    def backoff(self) -> Backoff:
        """Pauses on this world's clock, without randomness."""
        uniform: Callable[[], float] = float
        return Backoff(
            first=0.2, factor=1.5, cap=5.0, clock=self.clock, sleep=self.sleep, uniform=uniform
        )
