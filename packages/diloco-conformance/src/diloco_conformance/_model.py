"""The model: what must be true of every replica, judged only by what was done to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco_protocol import Reason, ReplicaState

if TYPE_CHECKING:
    from diloco_protocol import Capabilities, ReplicaHandle, ReplicaResult, ReplicaStatus


@dataclass(eq=False, slots=True)
class Replica:
    """One replica as the suite knows it.

    Attributes:
        handle: Its handle.
        run: The run it belongs to.
        state: Its state, as far as it follows from what was done.
        attempt: The number of its present attempt.
        reason: Why it has ended; None if the suite did not end it.
        exit_code: Its exit code after a failure, if the suite chose it.
        signal: The signal that has ended it, if the suite chose it.
        result: What it returned.
        stopping: Whether a cancel of it was accepted.
        cancelled_by: The id of the promise that this cancel is checked under.
        raced: Whether it has ended by itself after a cancel of it was accepted.
        doomed: Whether a sibling has failed in a backend whose failure scope is the gang.
        begun_at: The earliest moment at which it may have started, on the world's clock. Where
            replicas start by themselves, they may have run for a while before the suite sees it.
        started_at: The latest moment at which it may have started: when it was seen to run.
        started: The earliest and the latest moment of its start, in Unix seconds.
        ended: The earliest and the latest moment of its end, if it was made to end, in Unix
            seconds.
        lines: The lines that it has written in this attempt, to both streams.
        streams: The same lines, separately for each stream.
        rest: What it has begun to write on each stream, and not finished.
        before: The lines that it has written in earlier attempts.
        restarts: How often it has been started again after a failure.
        gone: Whether its records were removed.
        lost: Whether its result was lost.
        said: The last answer of an executor that was asked to describe it.
        told: The terminal state that executors have reported, by any verb; those that have may
            remember it.
        watcher: The executor that has seen it run, or has reported that it was too late.
        answer: Its first terminal result from collect.
    """

    handle: ReplicaHandle
    run: Run
    state: ReplicaState = ReplicaState.PENDING
    attempt: int = 1
    reason: Reason | None = None
    exit_code: int | None = None
    signal: str | None = None
    result: Any = None
    stopping: bool = False
    cancelled_by: str = "C5"
    raced: bool = False
    doomed: bool = False
    begun_at: float | None = None
    started_at: float | None = None
    started: tuple[float, float] | None = None
    ended: tuple[float, float] | None = None
    lines: list[str] = field(default_factory=list)
    streams: dict[str, list[str]] = field(default_factory=dict)
    rest: dict[str, bytes] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    restarts: int = 0
    gone: bool = False
    lost: bool = False
    said: ReplicaStatus | None = None
    told: ReplicaState | None = None
    watcher: object = None
    answer: ReplicaResult | None = None

    def __str__(self) -> str:
        return f"rank {self.handle.rank} of {self.run.name}"

    @property
    def live(self) -> bool:
        """Say whether it has not ended."""
        return not self.state.terminal

    def tell(self, state: ReplicaState) -> None:
        """Record that an executor has truly said that it is in this state."""
        if state.terminal:
            self.told = state

    def nobody_knows(self) -> None:
        """Forget what executors have said: the next one to be asked has never heard of it."""
        self.said = self.told = None

    def overdue(self, now: float) -> bool:
        """Say whether it is certainly past its timeout."""
        return self.live and self._past(self.started_at, now)

    def may_be_overdue(self, now: float) -> bool:
        """Say whether it may be past its timeout."""
        return self.live and self._past(self.begun_at, now)

    def _past(self, started_at: float | None, now: float) -> bool:
        timeout = self.run.timeout
        return started_at is not None and timeout is not None and now - started_at > timeout

    def write(self, data: bytes, stream: str = "stdout") -> None:
        """Record what it has written."""
        *lines, self.rest[stream] = (self.rest.get(stream, b"") + data).split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        self.lines += texts
        self.streams.setdefault(stream, []).extend(texts)

    def finish_lines(self) -> None:
        """Record that it writes no more in this attempt: an unfinished line is a line now."""
        for stream in [stream for stream, rest in self.rest.items() if rest]:
            self.write(b"\n", stream)

    def again(self, *, counted: bool) -> None:
        """Record that its next attempt waits to be started."""
        self.finish_lines()
        self.state, self.started = ReplicaState.PENDING, None
        self.begun_at = self.started_at = None
        self.attempt += counted
        self.before += self.lines
        self.lines, self.streams = [], {}

    def end(
        self,
        state: ReplicaState,
        reason: Reason | None,
        exit_code: int | None = None,
        result: Any = None,
    ) -> None:
        """Record that it has ended."""
        self.state, self.reason, self.exit_code, self.result = state, reason, exit_code, result
        self.stopping = self.doomed = False
        self.finish_lines()

    def possible(self, now: float, capabilities: Capabilities) -> dict[ReplicaState, Reason | None]:
        """Return the states that may be true now, with the reasons of the terminal ones."""
        if not self.live:
            return {self.state: self.reason}
        states: dict[ReplicaState, Reason | None] = {self.state: None}
        if self.stopping:
            states[ReplicaState.CANCELLED] = Reason.CANCEL_REQUESTED
        gang = self.run.replicas if capabilities.failure_scope == "gang" else []
        if self.doomed or any(one.may_be_overdue(now) for one in gang):
            states[ReplicaState.FAILED] = Reason.GANG_FAILED
        if self.may_be_overdue(now):
            states[ReplicaState.FAILED] = Reason.TIMEOUT
        return states


@dataclass(eq=False, slots=True)
class Run:
    """One launch as the suite knows it.

    Attributes:
        name: Its name in messages.
        run_id: Its run_id.
        timeout: Its timeout in seconds; None if it has none.
        kwargs: The arguments its replicas were given.
        launched_at: When it was launched, on the world's clock.
        options: The other arguments of its launch.
        replicas: Its replicas in rank order.
    """

    name: str
    run_id: str
    timeout: float | None
    kwargs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    launched_at: float = 0.0
    replicas: list[Replica] = field(default_factory=list)

    @property
    def handles(self) -> list[ReplicaHandle]:
        """Return the handles in rank order."""
        return [replica.handle for replica in self.replicas]

    @property
    def first_rank(self) -> int:
        """Return its lowest rank."""
        return int(self.options.get("rank_offset", 0))

    @property
    def live(self) -> bool:
        """Say whether any replica has not ended."""
        return any(replica.live for replica in self.replicas)


def cancelled(replica: Replica, capabilities: Capabilities) -> None:
    """Record that a cancel of this replica was accepted."""
    scope = replica.run.replicas if capabilities.cancel_scope == "gang" else [replica]
    for one in scope:
        if one.live:
            one.stopping = True


def stopped(replica: Replica, capabilities: Capabilities) -> None:
    """Record that this replica was stopped from outside.

    Where nothing less than a run can be ended, all of its run was stopped.
    """
    scope = replica.run.replicas if capabilities.cancel_scope == "gang" else [replica]
    for one in scope:
        if one.live:
            one.end(ReplicaState.CANCELLED, Reason.STOPPED_EXTERNALLY)


def failed(replica: Replica, capabilities: Capabilities) -> None:
    """Record that this replica has failed."""
    if capabilities.failure_scope == "gang":
        for one in replica.run.replicas:
            if one.live:
                one.doomed = True
