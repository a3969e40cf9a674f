"""What an incarnation writes when it ends: that it leaves, or why it has failed.

The content is only shown in log messages and errors.

That the incarnation ends follows from the key alone (see :class:`._keys.Hint`), and only the key
decides whether others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from ..._errors import CorruptedObjectError, FormatError, ReplicaLostError, UnequalSyncsError
from ..._exchange._endings import Ending, Progress, as_text, cause_of, conclude
from ..._redact import redact
from ..._wire._sealed import seal, unsealed_fields

_LONGEST = 1000


class Farewell(NamedTuple):
    """How an incarnation has ended.

    Attributes:
        event: ``left``, ``failed``, or ``left or failed`` if its hint cannot be read.
        reason: Why it has failed.
        cause: The rank of the replica that caused its failure, if it was another one.
    """

    event: str
    reason: str = ""
    cause: int | None = None


def farewell(key: str, error: BaseException | None, rank: int | None = None) -> bytes:
    """Return the content of the hint that says how an incarnation of a rank has ended.

    It has left the run if ``error`` is None; otherwise it has failed with this error.
    """
    if error is None:
        return seal("farewell", key, {"event": "left", "reason": ""})
    fields = {"event": "failed", "reason": redact(as_text(error))[:_LONGEST]}
    cause = cause_of(rank, error)
    return seal("farewell", key, fields if cause is None else {**fields, "cause": cause})


def read_farewell(key: str, read: Callable[[str], bytes | None]) -> Farewell:
    """Return how an incarnation has ended, as its hint says."""
    try:
        data = read(key)
        if data is not None:
            fields = unsealed_fields("farewell", key, data, key)
            cause = fields.whole("cause", 0, 99999) if "cause" in fields.names() else None
            reason = " ".join(fields.text("reason")[:_LONGEST].split())
            return Farewell(fields.text("event", "left|failed"), reason, cause)
    except (CorruptedObjectError, FormatError):
        # The hint's key says that the incarnation has ended, and nothing depends on its content
        pass
    return Farewell("left or failed")


def concluded(own: int, rank: int, said: Farewell, syncs: int) -> tuple[int, str]:
    """Of a fixed run: the rank that was lost first, and a sentence about it.

    Args:
        own: The rank of the replica that waits.
        rank: The rank that has ended, and is waited for.
        said: How it has ended.
        syncs: How many syncs were taken before.

    Raises:
        UnequalSyncsError: It has left.
    """
    progress = Progress(syncs, syncs)
    if said.event == "left or failed":
        return rank, f"rank {rank} has {said.event} after {progress}"
    event: Literal["left", "failed"] = "left" if said.event == "left" else "failed"
    ending = Ending(rank, event, progress, said.reason, said.cause)
    error = conclude({rank: ending}, [rank], own, progress)
    if isinstance(error, UnequalSyncsError):
        raise error
    assert isinstance(error, ReplicaLostError)
    return error.rank, str(error)
