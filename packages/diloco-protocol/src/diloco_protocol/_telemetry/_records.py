"""The records of telemetry, and how they become bytes and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import ClassVar, Self

from .._errors import InvalidRequestError, SpecVersionError
from .._fields import check_version
from .._json import check_size, loads
from ._checks import CHECKS, Metric, Phase

VERSION = 1
"""Version of all records here."""
LIVE_BYTES = 64 * 1024
"""The largest ``live/`` object."""
HISTORY_BYTES = 1024 * 1024
"""The largest ``history/`` object."""
LINE_BYTES = 32 * 1024
"""The longest line in it, with its end."""
MOST_LINES = 4096
"""The most lines that are read of one ``history/`` object."""


class _Record:
    """A record whose fields are checked when it is made."""

    _called: ClassVar[str]
    _most: ClassVar[int]
    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type] # a dataclass
            check = CHECKS.get(item.name) or CHECKS[str(item.type)]
            object.__setattr__(self, item.name, check(item.name, getattr(self, item.name)))

    def to_bytes(self) -> bytes:
        """Return the record as one line of JSON, with its end."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        # Not escaped, so that no character takes more than four bytes.
        line = json.dumps(
            {"version": VERSION, **values},
            ensure_ascii=False, separators=(",", ":"), allow_nan=False,
        )  # fmt: skip
        return f"{line}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Make a record from what :meth:`to_bytes` returned; unknown fields are ignored.

        Raises:
            SpecVersionError: The record is of another version.
            InvalidRequestError: It is not such a record, or larger than any.
        """
        check_size(cls._called, len(data), cls._most)
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{cls._called} is not UTF-8: {error}") from None
        record = check_version(cls._called, loads(text, cls._called), VERSION)
        known = fields(cls)  # type: ignore[arg-type]
        lacking = [
            item.name
            for item in known
            if item.name not in record and item.default is item.default_factory is MISSING
        ]
        if lacking:
            raise InvalidRequestError(f"{cls._called} lacks {', '.join(lacking)}")
        return cls(**{item.name: record[item.name] for item in known if item.name in record})


@dataclass(frozen=True, slots=True, kw_only=True)
class Live(_Record):
    """What a replica does now.

    Attributes:
        run: Name of the launch; empty if it has none.
        rank: The rank of the replica.
        world_size: Number of ranks of the run.
        epoch: Which incarnation of the rank this is, from 1.
        attempt: Which attempt of its launch this is; None if that is not known.
        host: Name of its machine.
        backend: Which backend has started it, if that is known.
        place: Where it runs, such as a region, if that is known.
        time: When this was written, in Unix seconds by the clock of the replica.
        step: Inner steps of the rank.
        sync: Outer steps of the run's model, as far as this replica has come.
        phase: What it does.
        waits_for: The ranks that it waits for, the first ones if there are many.
        missing: How many ranks it waits for in all.
        seconds_per_step: Seconds of training per inner step lately; None before any was seen.
        training_share: Share of the incarnation's time that went into training, from 0 to 1, up to
            its last sync; None before that.
        bytes_sent: Bytes that the syncs of this incarnation have sent.
        bytes_received: Bytes that they have received.
        writes: Requests by which its process has written to the store, or listed it; None in a
            folder, or if that is not known.
        reads: Likewise, those by which it has read.
        dropped: How many lines the incarnation has left out of its history.
        ended: How it has ended (``"left"`` or ``"failed"``); None as long as it has not.
        error: Why it has failed; empty if it has not.
        metrics: The last value of each metric.
        setup: The versions of its programs, and the settings of its outer loop, by name; bounded as
            metrics are.
    """

    _called = "a live record"
    _most = LIVE_BYTES

    run: str
    rank: int
    world_size: int
    epoch: int
    attempt: int | None = None
    host: str = ""
    backend: str = ""
    place: str = ""
    time: float
    step: int
    sync: int
    phase: Phase
    waits_for: tuple[int, ...] = ()
    missing: int = 0
    seconds_per_step: float | None = None
    training_share: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    writes: int | None = None
    reads: int | None = None
    dropped: int = 0
    ended: str | None = None
    error: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    setup: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLine(_Record):
    """What one sync did, as its replica saw it.

    Attributes:
        number: The number of the sync among those of the incarnation, from 1.
        time: When it was over, in Unix seconds by the clock of the replica.
        attempt: As in :class:`Live`, and so is ``host``.
        host: Name of the replica's machine.
        sync: Outer steps of the run's model after it; the same as before if it took none.
        fragment: Name of what was synced.
        committed: Whether the new values were adopted.
        members: How many replicas contributed.
        bytes_sent: Bytes that the replica has sent.
        bytes_received: Bytes that it has received.
        wait_seconds: Seconds spent waiting for others.
        exchange_seconds: Seconds spent in the sync, without those.
        compute_seconds: Seconds of training since the sync before.
        hidden_seconds: Seconds of the sync beside which the replica trained.
        exposed_seconds: Seconds in which it did not train because of the sync.
        inner_steps: Inner steps that its contribution covers.
        total_inner_steps: Inner steps of the rank so far.
        outer_lr: The learning rates of the outer step; none without one.
        contribution: What became of the replica's contribution.
        reloaded: Whether it had to start again from the published state.
        batches_to_skip: How many batches its data loader has to skip.
        weights: The share of each member; none if all count the same, or if there are more than
            :data:`MOST_RANKS`.
        clipped: The smallest factor by which each member's contribution was scaled down; none if
            none was, or if there are more members than that.
        metrics: What was logged since the sync before.
    """

    _called = "a line of a history"
    _most = LINE_BYTES

    number: int
    time: float
    attempt: int | None = None
    host: str = ""
    sync: int
    fragment: str
    committed: bool
    members: int
    bytes_sent: int
    bytes_received: int
    wait_seconds: float
    exchange_seconds: float
    compute_seconds: float = 0.0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    inner_steps: int = 0
    total_inner_steps: int = 0
    outer_lr: tuple[float, ...] = ()
    contribution: str = ""
    reloaded: bool = False
    batches_to_skip: int = 0
    weights: tuple[float, ...] = ()
    clipped: tuple[float, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """What was read of a ``history/`` object.

    Attributes:
        lines: The lines, in their order.
        skipped: How many were not lines of a history.
        of_another_version: How many were of another version.
    """

    lines: tuple[SyncLine, ...]
    skipped: int
    of_another_version: int


def read_history(data: bytes) -> History:
    """Read a ``history/`` object. What is torn or not a line of a history is skipped and counted.

    Raises:
        InvalidRequestError: It is larger than any such object.
    """
    check_size("this history", len(data), HISTORY_BYTES)
    lines: list[SyncLine] = []
    written = [line for line in data.split(b"\n") if line]
    skipped, of_another_version = max(0, len(written) - MOST_LINES), 0
    for line in written[:MOST_LINES]:
        try:
            lines.append(SyncLine.from_bytes(line))
        except SpecVersionError:
            of_another_version += 1
        except InvalidRequestError:
            skipped += 1
    return History(tuple(lines), skipped, of_another_version)
