"""The words between the suite and a harness: what can be done to a world, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import EllipsisType
from typing import Any

from diloco_protocol import ReplicaState


class Step(StrEnum):
    """Steps that a replica can be made to take.

    START, SUCCEED and FAIL are needed; the others may be declared impossible.

    Attributes:
        START: Its program runs now; value: None.
        SUCCEED: Its program returns; value: the result (JSON).
        FAIL: Its program exits; value: the exit code, 1 … 255.
        OOM: It is killed for want of memory; value: None.
        KILL: Its program is ended by a signal that it sends to itself; value: the signal's name,
            such as ``"SIGABRT"``.
        PREEMPT: Its machine is taken away, and the backend will start it again; value: what its
            program has returned just before, which counts for nothing, since the success was not
            recorded; None: nothing. Worlds in which that is impossible ignore the value.
        PRINT: Its program writes lines to standard output; value: list of text.
        STOP: It is ended from outside, by the platform's own means and not through an executor, and
            has ended; value: None.
    """

    START = "start"
    SUCCEED = "succeed"
    FAIL = "fail"
    OOM = "oom"
    KILL = "kill"
    PREEMPT = "preempt"
    PRINT = "print"
    STOP = "stop"


class Operation(StrEnum):
    """The calls to the backend that can be disturbed.

    Attributes:
        LAUNCH: Calls that create replicas.
        OBSERVE: Calls that read states, results and runs: describe, collect, list_runs, attach,
            exists.
        CANCEL: Calls that end replicas.
        PURGE: Calls that remove records.
        LOGS: Calls that read logs.
    """

    LAUNCH = "launch"
    OBSERVE = "observe"
    CANCEL = "cancel"
    PURGE = "purge"
    LOGS = "logs"


class Fault(StrEnum):
    """Ways to disturb a call, each with what the executor is to do.

    Attributes:
        THROTTLE: Too many requests: ThrottledError, or retried.
        SERVER_ERROR: An internal error of the backend, nothing done: a retryable BackendError, or
            retried.
        REFUSED: No connection, nothing done: a retryable BackendError, or retried.
        CUT: The connection is cut before the request is done: a retryable BackendError, or retried.
        FORBIDDEN: The credentials do not allow it: a BackendError that is not retryable.
        CONFLICT: The backend refuses because of a conflict: a BackendError.
        AMBIGUOUS: The request is done, and then the connection is cut. Only for LAUNCH, and once.
        UNANSWERED: As AMBIGUOUS, with every request. Only for LAUNCH.
    """

    THROTTLE = "throttle"
    SERVER_ERROR = "server error"
    REFUSED = "refused"
    CUT = "cut"
    FORBIDDEN = "forbidden"
    CONFLICT = "conflict"
    AMBIGUOUS = "ambiguous"
    UNANSWERED = "unanswered"


class Ability(StrEnum):
    """Other abilities that a world may lack.

    Attributes:
        RACE: A replica that is being cancelled can SUCCEED, FAIL or PREEMPT.
        TIMEOUT: Time can be made to pass until a replica is overdue.
        EXPIRE: The backend can forget a run that has ended.
        CALLS: Calls can be counted.
        SENT: The requests that were sent can be read.
        TOLD: The rank, arguments and environment that a replica was told can be read.
        WRITE: A program can be made to write any bytes, to standard output and to standard error.
        SECRETS: There is a store of secrets. Without one, launches with secrets are refused.
        LABELS: The labels of what was launched can be read.
        RESTART: A failed replica of a run with restarts is started again. START and FAIL are then
            for its next attempt.
        AGE: Days can be made to pass.
        ELSEWHERE: There can be an executor of the same backend on another account, cluster or host.
        RESOURCES: The resources that the platform was asked for on behalf of a replica can be read.
        LOSE: The result of a replica that has succeeded can be lost.
        DAMAGE: Something else can be left in its place.
        FOREIGN: Something that is not diloco's can have the name of a run.
        REMOVE: The removal of a run can be under way.
        BETWEEN: Something can be done between two calls that list a page of the runs.
    """

    RACE = "race"
    TIMEOUT = "timeout"
    EXPIRE = "expire"
    CALLS = "calls"
    SENT = "sent"
    TOLD = "told"
    WRITE = "write"
    SECRETS = "secrets"
    LABELS = "labels"
    RESTART = "restart"
    AGE = "age"
    ELSEWHERE = "elsewhere"
    RESOURCES = "resources"
    LOSE = "lose"
    DAMAGE = "damage"
    FOREIGN = "foreign"
    REMOVE = "remove"
    BETWEEN = "between"


_WITHOUT_METHOD = frozenset({Ability.RACE, Ability.TIMEOUT, Ability.RESTART})
_OTHER_NAMES = {Ability.SECRETS: "secret", Ability.DAMAGE: "lose"}
#: For each ability that needs a method of the harness, the name of that method.
HOOKS: Mapping[Ability, str] = {
    ability: _OTHER_NAMES.get(ability, str(ability))
    for ability in Ability
    if ability not in _WITHOUT_METHOD
}


@dataclass(frozen=True, slots=True)
class Truth:
    """The truth about a replica, from the world and not from the executor.

    Attributes:
        state: Its state; None if the backend has no record of it. It is terminal only if the
            backend's records say so.
        alive: Whether anything of it still exists that costs money: process, pod, machine.
        attempt: The number of its present attempt.
        stopping: Whether it is being ended and is not yet gone.
        exit_code: For a failed replica, the exit code in the world's records; ``...`` if they do
            not say. With it, the suite finds a ``drive`` that makes programs exit with another code
            than was asked for.
        out_of_memory: Likewise, whether the records say that memory ran out.
    """

    state: ReplicaState | None
    alive: bool
    attempt: int = 1
    stopping: bool = False
    exit_code: int | EllipsisType | None = ...
    out_of_memory: bool | EllipsisType = ...

    def __post_init__(self) -> None:
        if self.state is not None:  # plain texts will do
            object.__setattr__(self, "state", ReplicaState(self.state))


@dataclass(frozen=True, slots=True)
class Told:
    """The facts that a replica was told, as its program saw them.

    Attributes:
        rank: Its rank.
        world_size: The number of replicas of the run.
        kwargs: The arguments of its entrypoint.
        environment: Its environment variables.
        timeout: The timeout in its spec, in seconds; None for no limit; ``...`` if the world cannot
            read it.
    """

    rank: int
    world_size: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float | EllipsisType | None = ...
