"""One call of a function: its input, its containers, its result."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from ._app import Function

PICKLE = 1  # DATA_FORMAT_PICKLE


class Status(enum.IntEnum):
    """The ends of a call: GenericResult.GenericStatus of Modal's protocol, by the same numbers."""

    SUCCESS = 1
    FAILURE = 2
    TERMINATED = 3
    TIMEOUT = 4
    INIT_FAILURE = 5
    INTERNAL_FAILURE = 6
    KERNEL_OOM_KILL = 10


@dataclass(frozen=True)
class Payload:
    """A value that is passed to a function or comes back from it.

    Attributes:
        data: the bytes themselves; empty if they are in a blob.
        blob: the ID of the blob, or an empty text.
        form: the DataFormat of the bytes.
    """

    data: bytes = b""
    blob: str = ""
    form: int = PICKLE


@dataclass(frozen=True)
class Result:
    """The end of a call.

    Attributes:
        status: the kind of end.
        payload: the value that was returned, or the exception that was raised; None if a container
            left nothing.
        message: the text of the exception.
        traceback: the traceback of the exception.
        more: fields of the result as the container sent them, for code that only passes them on.
    """

    status: Status
    payload: Payload | None = None
    message: str = ""
    traceback: str = ""
    more: bytes = b""


@dataclass
class Life:
    """One container in which a call runs.

    Attributes:
        task_id: the ID of the container.
        started: when it started, in seconds since the epoch.
        ended: when the container was gone; None while it exists.
        interrupted: when its program was told to end; None if it was not.
        cancelled: whether the program is to be told that its input was cancelled.
        fetched: whether the program has its input.
    """

    task_id: str
    started: float
    ended: float | None = None
    interrupted: float | None = None
    cancelled: bool = False
    fetched: bool = False


@dataclass
class Call:
    """A call of a function; only ``Calls`` changes it, under the lock of the workspace.

    Attributes:
        call_id: ``fc-…``.
        input_id: ``in-…``.
        function: the called function, with its options.
        payload: its arguments.
        created: when it was made, in seconds since the epoch.
        lives: the containers in which it has run.
        result: how it has ended; None while it has not.
        ended: when it got its result.
        interrupt_seconds: how long its program takes to end after SIGINT; None for the habit of the
            workspace, infinity if it does not react.
        last_words: the last action of its program before it ends because of an interruption.
    """

    call_id: str
    input_id: str
    function: Function
    payload: Payload
    created: float
    lives: list[Life] = field(default_factory=list)
    result: Result | None = None
    ended: float | None = None
    interrupt_seconds: float | None = None
    last_words: Callable[[], None] | None = None

    @property
    def life(self) -> Life | None:
        """Return the container in which it runs now; None if it runs in none."""
        return self.lives[-1] if self.lives and self.lives[-1].ended is None else None

    @property
    def status(self) -> str:
        """Return ``pending``, ``running``, or how it has ended, such as ``kernel_oom_kill``."""
        if self.result is not None:
            return self.result.status.name.lower()
        return "pending" if self.life is None else "running"
