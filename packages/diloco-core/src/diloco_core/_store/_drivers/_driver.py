"""A driver of a store behind a network: it sends single requests, and says what errors mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from .._api import Buffer
from ._uploads import UploadBlocks


class Verdict(Enum):
    """What an error of a driver means."""

    MISSING = auto()
    """The object does not exist."""
    EXISTS = auto()
    """The object exists already."""
    NO_BUCKET = auto()
    """The bucket does not exist."""
    FORBIDDEN = auto()
    """The credentials are missing, wrong, or do not allow this request."""
    EXPIRED = auto()
    """The credentials have ended, or there are none at the moment: the source may have new ones."""
    CLOCK = auto()
    """The service finds that the time of the request is wrong."""
    WRONG_PLACE = auto()
    """The bucket is in another region, or behind another endpoint."""
    TRANSIENT = auto()
    """The request may succeed the next time. Whether this one has taken effect is not known."""
    THROTTLED = auto()
    """The same, and there are too many requests."""
    REFUSED = auto()
    """The service does not have this kind of request, or refuses a header of it."""
    PERMANENT = auto()
    """The request will not succeed the next time either."""

    @property
    def passes(self) -> bool:
        """Say whether the same request may succeed the next time, if nobody does anything."""
        return self in {Verdict.TRANSIENT, Verdict.THROTTLED}


ANEW = {Verdict.TRANSIENT, Verdict.THROTTLED, Verdict.EXPIRED, Verdict.CLOCK}
"""Errors after which an upload in parts may be sent again from the beginning of the object."""


class Sending(NamedTuple):
    """How a large object is written.

    Attributes:
        exclusive: Whether it is written only if the key does not exist.
        attempt: Calls a function until it succeeds, for steps that can be repeated, and returns
            what it returns.
        patience: For how many seconds steps are repeated that only the driver can repeat.
        at_once: The number of parts that are sent at the same time.
    """

    exclusive: bool
    attempt: Callable[[Callable[[], Any]], Any]
    patience: float
    at_once: int


class Driver(Protocol):
    """Sends single requests to one prefix; keys are relative to it.

    Thread-safe. It raises the errors of its own library.
    """

    name: str
    near: bool
    exclusive: bool
    """True if an exclusive write is a single step: nothing happens between looking and writing."""
    deletes_many: bool
    """Whether it deletes many objects with one request."""
    copies: int
    """Copies of a part that it holds while it sends the part; 0 if it sends the caller's buffer."""

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object; if ``exclusive``, only if the key does not exist."""

    def upload(self, key: str, blocks: UploadBlocks, sending: Sending) -> None:
        """Write a large object in one step. ``blocks`` can be iterated over only once."""

    def get(self, key: str, largest: int) -> Buffer:
        """Read a whole object.

        Raises:
            TooLargeError: It has more than ``largest`` bytes; at most a small part of it was read.
        """

    def head(self, key: str) -> tuple[int, Buffer]:
        """An object's size in bytes, and its first bytes if they come with the same request."""

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes in bytes."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """Return what an error means, and its text without details for developers of the driver."""

    def renew(self) -> None:
        """Ask the source of the credentials for new ones.

        Called when the service says that the credentials have ended.
        """


class TooLargeError(Exception):
    """An object is larger than what may be read in one piece.

    Raised by drivers; never leaves the store.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size
