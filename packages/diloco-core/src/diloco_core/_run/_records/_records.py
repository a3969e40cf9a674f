"""The records of a run: everything in the store except tensors. Their keys are in :mod:`._keys`.

Every record is sealed (:mod:`._sealed`): its bytes and its key are verified before it is read.

A prefix may be emptied and used again while an incarnation of the earlier run still writes there.
So everything is bound to its run. The name of a run is the digest of its manifest: records of the
log hold it (:func:`of_run`), keys of contributions have it in their ``schema``, and checksums of
tensors have it in their seeds. The initial state, which the manifest names, is bound to a nonce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import xxhash

from ..._arithmetic._rate import NO_RATE, Rate, digits, values_of
from ..._errors import CorruptedObjectError, RunExistsError
from ..._wire._sealed import Fields, seal, unsealed_fields
from ._keys import Delta, commit_key, done_key

T = TypeVar("T", bound="Commit | Rollback | Done")
DIGEST = "[0-9a-f]{16}"


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a sync.

    Attributes:
        sync: Its number.
        fragment: Index of the fragment.
        base: Digest of the fragment's state before the sync.
        previous: Digest of the record before this one; for the first record, the name of the run.
        members: The contributions that count, in rank order.
        positions: The inner steps counted in the fragment's state after this sync, by rank.
        rate: The learning rate of this outer step. Everybody takes it from here, also those who
            take the step again.
        outer_steps: Outer steps that the fragment's state has taken after this sync, without those
            that were given up.
        rollback: Number of the newest rollback before this record; 0 if there was none.
        run: Name of the run.
    """

    sync: int
    fragment: int
    base: str
    previous: str
    members: tuple[Delta, ...]
    positions: Mapping[int, int]
    outer_steps: int
    rollback: int = 0
    rate: Rate = NO_RATE
    run: str = field(kw_only=True)

    @property
    def digest(self) -> str:
        """Digest of the record as stored."""
        return digest(self.to_json())

    def to_json(self) -> bytes:
        """The record as stored."""
        return seal("commit", commit_key(self.sync), self.fields())

    def fields(self) -> dict[str, Any]:
        """The fields of the record, in the order in which they are stored."""
        return {
            "run": self.run,
            "sync": self.sync,
            "fragment": self.fragment,
            "base": self.base,
            "previous": self.previous,
            "rollback": self.rollback,
            "members": list(map(_member_fields, self.members)),
            "positions": _pairs(self.positions),
            "outer_steps": self.outer_steps,
            "outer_lr": [digits([value]) for value in self.rate.values],
            "lr_wish": {"n": self.rate.number, "rank": self.rate.rank, "epoch": self.rate.epoch},
        }

    @classmethod
    def from_json(cls, data: bytes, sync: int, origin: str) -> Commit:
        """Read a stored record.

        Raises:
            CorruptedObjectError: The data is not the record of this sync as it was written.
            FormatError: Another version has written it.
        """
        return cls.from_fields(unsealed_fields("commit", commit_key(sync), data, origin), sync)

    @classmethod
    def from_fields(cls, fields: Fields, sync: int) -> Commit:
        """The record that has these fields."""
        fields.agree("sync", sync)
        members = tuple(_member(member, sync) for member in fields.parts("members"))
        ranks = [member.rank for member in members]
        if not ranks or ranks != sorted(set(ranks)):
            raise fields.wrong("its members must be of different ranks, in order")
        positions = fields.numbers("positions")
        if any(positions.get(member.rank) != member.stop for member in members):
            raise fields.wrong("its positions are not those of its members")
        return cls(
            sync,
            fields.whole("fragment", 0, sync - 1),
            fields.text("base", DIGEST),
            fields.text("previous", DIGEST),
            members,
            positions,
            fields.whole("outer_steps", 1, sync),
            fields.whole("rollback", 0, sync - 1),
            _rate(fields),
            run=fields.text("run", DIGEST),
        )


class GivenUp(NamedTuple):
    """Why a run with fixed membership has ended without one of its ranks.

    Attributes:
        missed: The rank that did not come back.
        by: The rank that waited for it.
        why: What became of it, as a sentence.
    """

    missed: int
    by: int
    why: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """The record that a run continues from older states, as newer ones cannot be made again.

    It takes the number of a sync in the log, and is decided like one. It deletes nothing.

    A run with fixed membership ends by such a record, too (``end``): it continues from the states
    that it had then.

    Attributes:
        sync: Its number in the log.
        states: For every fragment, the sync from whose state the run continues; 0: the initial one.
        given_up: The syncs that are given up.
        fence: The highest epoch of every rank at that time. These incarnations stop, unless they
            have agreed beforehand.
        rollback: Number of the rollback before this one; 0 if there was none.
        run: Name of the run.
        end: Why the run has ended with this record; None if it has not.
    """

    sync: int
    states: tuple[int, ...]
    given_up: tuple[int, ...]
    fence: Mapping[int, int]
    rollback: int = 0
    run: str = field(kw_only=True)
    end: GivenUp | None = field(default=None, kw_only=True)

    @property
    def digest(self) -> str:
        """Digest of the record as stored."""
        return digest(self.to_json())

    def to_json(self) -> bytes:
        """The record as stored."""
        fields: dict[str, Any] = {
            "run": self.run,
            "sync": self.sync,
            "states": list(self.states),
            "given_up": list(self.given_up),
            "fence": _pairs(self.fence),
            "rollback": self.rollback,
        }
        if self.end is not None:
            fields["end"] = self.end._asdict()
        return seal("rollback", commit_key(self.sync), fields)

    @classmethod
    def from_json(cls, data: bytes, sync: int, origin: str) -> Rollback:
        """Read a stored record.

        Raises:
            CorruptedObjectError: The data is not the record of this sync as it was written.
            FormatError: Another version has written it.
        """
        fields = unsealed_fields("rollback", commit_key(sync), data, origin)
        fields.agree("sync", sync)
        states = tuple(fields.wholes("states", 0, sync - 1))
        if not states or any(
            state and (state - 1) % len(states) != index for index, state in enumerate(states)
        ):
            raise fields.wrong(
                "one of its states belongs to another fragment than its position in the list"
            )
        given_up = tuple(fields.wholes("given_up", 1, sync - 1))
        fence, rollback = fields.numbers("fence", 1), fields.whole("rollback", 0, sync - 1)
        end = None
        if "end" in fields.names():
            part = fields.part("end")
            end = GivenUp(part.whole("missed"), part.whole("by"), part.text("why"))
        return cls(sync, states, given_up, fence, rollback, run=fields.text("run", DIGEST), end=end)


def read_record(
    data: bytes, sync: int, origin: str, fragments: int | None = None
) -> Commit | Rollback:
    """The record with this number in the log, of a run with so many fragments, if that is known.

    Raises:
        CorruptedObjectError: The data is not what was written.
        FormatError: Another version has written it.
    """
    if b'"kind": "rollback"' in data[:40]:  # if this is damaged, the checksum shows it
        rollback = Rollback.from_json(data, sync, origin)
        count = len(rollback.states)
        if fragments not in {None, count}:
            raise CorruptedObjectError(
                f"{origin} names {count} states, but the run has {fragments} fragments"
            )
        return rollback
    return Commit.from_json(data, sync, origin)


@dataclass(frozen=True, slots=True)
class Done:
    """The record that all shards of a fragment's state are published, with their checksums.

    Attributes:
        sync: The sync after which the fragment has this state; 0 for the initial state.
        fragment: Index of the fragment.
        sums: Checksums of the shards' values.
        rests: Checksums of everything else in the shards' files.
        commit: The record of the sync, so that it can be written again; None for the initial state.
        full: Whether the files of the shards hold all values, or only how the sync has changed
            them. The record says so only in the latter case.
    """

    sync: int
    fragment: int
    sums: tuple[int, ...]
    rests: tuple[int, ...]
    commit: Commit | None
    full: bool = True

    @property
    def run(self) -> str:
        """Name of the run; empty for the initial state, which is described by the manifest."""
        return self.commit.run if self.commit else ""

    def to_json(self) -> bytes:
        """The record as stored."""
        assert self.commit is not None  # the manifest names the initial state
        fields = {
            "sync": self.sync,
            "fragment": self.fragment,
            **({} if self.full else {"full": False}),
            "sums": hexadecimal(self.sums),
            "rests": hexadecimal(self.rests),
            "commit_digest": self.commit.digest,
            "commit": self.commit.fields(),
        }
        return seal("done", done_key(self.sync, self.fragment), fields)

    @classmethod
    def from_json(cls, data: bytes, sync: int, fragment: int, origin: str) -> Done:
        """Read a stored record.

        Raises:
            CorruptedObjectError: The data is not the record of this state as it was written.
            FormatError: Another version has written it.
        """
        fields = unsealed_fields("done", done_key(sync, fragment), data, origin)
        fields.agree("sync", sync)
        fields.agree("fragment", fragment)
        commit = Commit.from_fields(fields.part("commit"), sync)
        stored_digest = fields.text("commit_digest", DIGEST)
        if commit.fragment != fragment or commit.digest != stored_digest:
            raise fields.wrong(
                "the record of the sync inside it is not the one for which it was written"
            )
        sums, rests = sums_in(fields, "sums"), sums_in(fields, "rests")
        full = "full" not in fields.names() or fields.truth("full")
        return cls(sync, fragment, sums, rests, commit, full)

    def check_shards(self, shards: int, origin: str) -> None:
        """Refuse a record of another number of shards than the fragment has.

        Raises:
            CorruptedObjectError: It has another number of them.
        """
        if not len(self.sums) == len(self.rests) == shards:
            raise CorruptedObjectError(
                f"{origin} names {len(self.sums)} shards, but fragment {self.fragment} has {shards}"
            )


def of_run(record: T, run: str, origin: str) -> T:
    """Return the record, after checking that it belongs to this run.

    A record of another run does not count as damage that could be repaired: it must not be
    overwritten, and no replica may continue from it.

    Raises:
        RunExistsError: It belongs to another run.
    """
    if record.run != run:
        raise RunExistsError(
            f"{origin} is a record of another run (the manifest of that run has the digest "
            f"{record.run}, and that of this replica's run has {run}). Most likely the prefix was "
            "emptied and used again while a replica of the earlier run was still running. Stop the "
            "replicas of the other run. If this is its only object, move it away and resume this "
            "run; otherwise begin this run on a prefix that was never used."
        )
    return record


def digest(data: bytes) -> str:
    """Digest of a record."""
    return xxhash.xxh3_64_hexdigest(data)


def state_digest(sums: Sequence[int]) -> str:
    """Digest of a fragment's state."""
    return digest(b"".join(value.to_bytes(8, "little") for value in sums))


def _member(fields: Fields, sync: int) -> Delta:
    delta = Delta.parse(fields.text("key"))
    if delta is None or delta.sync != sync:
        raise fields.wrong("its key is not that of a contribution to this sync")
    for name, value in _member_fields(delta).items():
        fields.agree(name, value)
    return delta


def _member_fields(member: Delta) -> dict[str, Any]:
    """Return the fields of a contribution in the record that counts it, in the order of storage."""
    fields = {
        "rank": member.rank,
        "epoch": member.epoch,
        "from": member.start,
        "to": member.stop,
        "key": member.key,
    }
    return {**fields, "tokens": member.tokens} if member.tokens else fields


def _rate(fields: Fields) -> Rate:
    values = values_of("".join(fields.texts("outer_lr", DIGEST)))
    if values is None:
        raise fields.wrong("an outer learning rate must be a positive number")
    wish = fields.part("lr_wish")
    # With a larger number, the key of the next wish could not be parsed.
    return Rate(values, wish.whole("n", most=999_999_998), wish.whole("rank"), wish.whole("epoch"))


def _pairs(numbers: Mapping[int, int]) -> list[list[int]]:
    return [[rank, number] for rank, number in sorted(numbers.items())]


def hexadecimal(sums: Iterable[int]) -> list[str]:
    return [f"{value:016x}" for value in sums]


def sums_in(fields: Fields, name: str) -> tuple[int, ...]:
    return tuple(int(value, 16) for value in fields.texts(name, DIGEST))
