"""The harness, which a backend supplies: a world, and what moves it behind the executor's back."""

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

    A scripted world is quick and can produce faults; one with real replicas proves that the script
    is true. Most backends have both. A method returns only when its work is done and the backend's
    own records show it. Only a cancel and its consequences may be under way until :meth:`settle`.

    Attributes:
        entrypoint: The entrypoint that is launched; in a world with real replicas, that of
            :class:`Puppets`.
        entrypoint_args: Arguments that the world needs itself; the suite adds its own.
        cannot: What this world cannot do (a Step, Fault, Operation or Ability), and why. The tests
            that need it are skipped with that reason.
        starts_by_itself: Whether replicas start without being driven: START then only waits until
            they have started, and PREEMPT until they have started again.
        timeout: Timeout of most launches, in seconds; no test reaches it.
        short_timeout: Timeout of the replicas that are to be overdue, in seconds.
        overrun: Seconds beyond that timeout after which they must have been ended, or be about to
            be.
        slack: Seconds by which collect may come back late.
        resolution: Seconds by which the times in the backend's records may be off.
        patience: Real seconds that one call may take before it counts as hung; 30 if it is not set,
            or 5 where time is virtual (:meth:`sleep` is not overridden), since nothing waits in
            real time there.
        many_ranks: How many replicas a large run of the suite has; more than ten, unless that is
            too much for this world.
        many_runs: A number of runs that fills more than one page of the backend's lists, or as many
            as this world can bear.
        long_log: A number of bytes that is more than the platform gives of a log in one page, or as
            many as this world can bear.
        keeps_carriage_returns: Whether a carriage return right before a newline is kept in logs;
            containerd drops it.
        gpus: Some values of ``gpu=`` that this backend takes, such as ``"H100:2"``; none if it has
            no GPUs.
        run_prefix: Start of the run_ids that the suite gives; where runs outlive a world, it must
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
        """Make a new executor on this world, with no memory of earlier ones.

        It is made with ``backoff=self.backoff()``. ``options`` are for its constructor: none, or
        some of ``env``, ``journal`` and ``run_id``.
        """

    @abstractmethod
    def drive(self, handle: ReplicaHandle, step: Step, value: Any = None) -> None:
        """Make a replica do something, behind the executor's back."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything that is under way come to its end.

        This includes cancels, gang failures, timeouts that are over, and lagging records.
        """

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Let time pass (``self.time.sleep``), with what the world does then, such as timeouts."""

    @abstractmethod
    def truth(self, handle: ReplicaHandle) -> Truth:
        """Return what is true of a replica."""

    @abstractmethod
    def living(self) -> int:
        """Return how many replicas are alive in this world, also those that others have started."""

    # --- what a world may leave out, if it declares so ---

    def expire(self, handles: Sequence[ReplicaHandle]) -> None:
        """Make the backend forget a run that has ended, as after its retention."""
        raise NotImplementedError(
            f"{type(self).__name__} has no expire(); declare Ability.EXPIRE in cannot"
        )

    def age(self, seconds: float) -> None:
        """Let days pass, with all that the backend then does by itself.

        That may be to forget runs after its retention.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no age(); declare Ability.AGE in cannot"
        )

    def elsewhere(self) -> BaseExecutor:
        """Return an executor of the same backend in another place, such as another account.

        The place may also be another cluster or host; it has never seen the replicas of this one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no elsewhere(); declare Ability.ELSEWHERE in cannot"
        )

    def inject(self, operation: Operation, fault: Fault, *, after: int = 0) -> None:
        """Disturb all calls of an operation, except the first ``after``, until :meth:`clear`.

        Several operations can be disturbed at the same time.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no inject(); declare the Faults in cannot"
        )

    def clear(self) -> None:
        """End all disturbances."""

    def calls(self) -> int:
        """Return how many calls the backend has received so far."""
        raise NotImplementedError(
            f"{type(self).__name__} has no calls(); declare Ability.CALLS in cannot"
        )

    def sent(self) -> list[dict[str, Any]]:
        """Return the requests of all launches so far, as the platform got them.

        Each has the form of an entry of ``Plan.requests``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no sent(); declare Ability.SENT in cannot"
        )

    def told(self, handle: ReplicaHandle) -> Told:
        """Return what a running replica was told.

        ``DILOCO_ATTEMPT`` in its environment is the attempt that runs.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no told(); declare Ability.TOLD in cannot"
        )

    def write(self, handle: ReplicaHandle, data: bytes, stream: str = "stdout") -> None:
        """Make a replica's program write exactly these bytes to ``"stdout"`` or ``"stderr"``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no write(); declare Ability.WRITE in cannot"
        )

    def secret(self, value: str) -> str:
        """Keep a secret in the backend's store, and return the reference that a launch takes.

        The same reference with ``-missing`` appended must refer to nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no secret(); declare Ability.SECRETS in cannot"
        )

    def labels(self, handle: ReplicaHandle) -> Mapping[str, str]:
        """Return the labels that the backend's own records have for a replica, or for its run."""
        raise NotImplementedError(
            f"{type(self).__name__} has no labels(); declare Ability.LABELS in cannot"
        )

    def close(self) -> None:
        """Release the world; nothing of it may be left running."""

    def now(self) -> float:
        """Return the Unix time of the backend's records; override it if that is not the clock."""
        return self.clock() if type(self).sleep is Harness.sleep else time.time()

    # --- for use in make_executor ---

    def clock(self) -> float:
        """Return the world's time in seconds; override it where time is real."""
        return self.time.clock()

    def sleep(self, seconds: float) -> None:
        """Sleep, as executors on this world do: the world goes on meanwhile.

        Override it where time is real.
        """
        if not self.time.idle():
            self.advance(seconds)

    def backoff(self) -> Backoff:
        """Return pauses on this world's clock, without randomness."""
        uniform: Callable[[], float] = float
        return Backoff(
            first=0.2, factor=1.5, cap=5.0, clock=self.clock, sleep=self.sleep, uniform=uniform
        )
