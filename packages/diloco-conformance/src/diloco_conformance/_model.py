"""What must be true of every replica, from what was done to it and from nothing else."""

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
        state: Its state by what was done.
        attempt: Its n-th life.
        reason: Why it has ended; None if that is not the suite's doing.
        exit_code: Of a failure, if the suite chose it.
        signal: The signal that has ended it, if the suite chose it.
        result: What it returned.
        stopping: A cancel of it was accepted.
        cancelled_by: The promise that this cancel is under.
        raced: It has ended by itself after a cancel of it was accepted.
        doomed: A sibling has failed in a backend whose failure scope is the gang.
        begun_at: When it was started at the earliest, on the world's clock. Where replicas start by
            themselves, they may have run for a while before it is seen.
        started_at: When it was started at the latest: when it was seen to run.
        started: From when to when that was, in Unix seconds.
        ended: From when to when it was made to end, in Unix seconds.
        lines: The lines that it has written in this attempt, to both streams.
        streams: The same, apart.
        rest: What it has begun to write, and not finished, on each stream.
        before: What it has written in earlier attempts.
        restarts: How often it has been started again after a failure.
        gone: Its records were removed.
        lost: Its result was.
        said: What the executors have said of it last, when they were asked to describe it.
        told: The end that they have told, by whatever verb; who has told it may remember it.
        watcher: The executor that has seen it run, or has told that it was too late.
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
        """Whether it has not ended."""
        return not self.state.terminal

    def tell(self, state: ReplicaState) -> None:
        """An executor has said that it is in this state, and that was true."""
        if state.terminal:
            self.told = state

    def nobody_knows(self) -> None:
        """Whoever is asked from now on has never heard of it."""
        self.said = self.told = None

    def overdue(self, now: float) -> bool:
        """Whether it is certainly past its timeout."""
        return self.live and self._past(self.started_at, now)

    def may_be_overdue(self, now: float) -> bool:
        """Whether it may be past its timeout."""
        return self.live and self._past(self.begun_at, now)

    def _past(self, started_at: float | None, now: float) -> bool:
        timeout = self.run.timeout
        return started_at is not None and timeout is not None and now - started_at > timeout

    def write(self, data: bytes, stream: str = "stdout") -> None:
        """It has written something."""
        *lines, self.rest[stream] = (self.rest.get(stream, b"") + data).split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        self.lines += texts
        self.streams.setdefault(stream, []).extend(texts)

    def finish_lines(self) -> None:
        """It writes no more in this attempt: what was not finished is a line."""
        for stream in [stream for stream, rest in self.rest.items() if rest]:
            self.write(b"\n", stream)

    def again(self, *, counted: bool) -> None:
        """Its next attempt waits for its start."""
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
        """It has ended."""
        self.state, self.reason, self.exit_code, self.result = state, reason, exit_code, result
        self.stopping = self.doomed = False
        self.finish_lines()

    def possible(self, now: float, capabilities: Capabilities) -> dict[ReplicaState, Reason | None]:
        """The states that may be true now, with the reason of the terminal ones."""
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
        name: What the messages call it.
        run_id: Its run_id.
        timeout: Its timeout in seconds; None if it has none.
        kwargs: The arguments its replicas were given.
        launched_at: When it was launched, on the world's clock.
        options: The other arguments of its launch.
        replicas: In rank order.
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
        """The handles in rank order."""
        return [replica.handle for replica in self.replicas]

    @property
    def first_rank(self) -> int:
        """Its lowest rank."""
        return int(self.options.get("rank_offset", 0))

    @property
    def live(self) -> bool:
        """Whether a replica has not ended."""
        return any(replica.live for replica in self.replicas)


def cancelled(replica: Replica, capabilities: Capabilities) -> None:
    """A cancel of this replica was accepted."""
    scope = replica.run.replicas if capabilities.cancel_scope == "gang" else [replica]
    for one in scope:
        if one.live:
            one.stopping = True


def stopped(replica: Replica, capabilities: Capabilities) -> None:
    """This replica was stopped from outside; where nothing less than a run can be ended, all of it was."""
    scope = replica.run.replicas if capabilities.cancel_scope == "gang" else [replica]
    for one in scope:
        if one.live:
            one.end(ReplicaState.CANCELLED, Reason.STOPPED_EXTERNALLY)


def failed(replica: Replica, capabilities: Capabilities) -> None:
    """This replica has failed."""
    if capabilities.failure_scope == "gang":
        for one in replica.run.replicas:
            if one.live:
                one.doomed = True
