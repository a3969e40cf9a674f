"""The keys of a run, and what they say.

Keys under the run's prefix, and whether they are only created or may be put again::

    beginning.json                                    put     a replica is uploading the
                                                              initial state; deleted
                                                              afterwards
    manifest.json                                     create  what the run is; names the
                                                              initial state
    manifest.copy.json                                put     the same, in case that is
                                                              lost
    claims/{rank}/{epoch}.json                        create  one incarnation of a rank;
                                                              the highest epoch is the
                                                              rightful one
    deltas/{sync}/{delta}.safetensors                 put     a contribution
    deltas/{sync}/lr.{n}.{rank}.{epoch}.{rates}.{schema}
                                                      put     an incarnation asks for
                                                              other outer learning rates
                                                              from this sync on
    deltas/{sync}/hint.{rank}.{epoch}.{event}         put     advice to join, leave or
                                                              repair; nothing is decided
                                                              by it
    beats/{rank}                                      put     fixed runs: a counter that
                                                              shows that the rank is alive
    commits/{sync}.json                               create  the members of a sync and
                                                              its outer learning rate, or
                                                              how the run ended or went
                                                              back: this alone decides
    state/{sync}/{fragment}.{shard}.safetensors       create  parameters and outer state
                                                              after the sync; with a
                                                              state_codec most hold how
                                                              the parameters have changed
    state/{sync}/{fragment}.done.json                 create  all shards of the state are
                                                              there: an incarnation can
                                                              start from it
    initial/{nonce}/{fragment}.{shard}.safetensors    put     the state before the first
                                                              sync
    kept/{key}                                        create  for some syncs: a copy of a
                                                              state that the run has gone
                                                              back to
    inner/{rank}/{epoch}.{sync}.safetensors           put     what belongs to one replica
                                                              alone
    unsynced/{nonce}/{number}.safetensors             put     what belongs to the model
                                                              and is not synced; never
                                                              deleted
    live/{rank}.json                                  put     telemetry: what it does now;
                                                              nothing is decided by it
    history/{rank}/{epoch}.{first}-{last}.jsonl       put     telemetry: a line for every
                                                              sync of an incarnation
    history/{rank}/{epoch}.end.json                   put     telemetry: the end of an
                                                              incarnation

``{delta}`` is ``{rank}.{epoch}.{from}-{to}[.{tokens}].{base}.{schema}.{groups}[.{rate}]``.

Syncs are numbered from 1; sync s is of fragment (s - 1) mod F. Keys that cannot be parsed do not
belong to the run, and are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..._arithmetic._contribution import Amount
from ..._arithmetic._rate import DIGITS, Rate, digits, values_of
from ..._arithmetic._sync_job import SyncJob
from ..._wire._sections import fingerprint

BEGINNING = "beginning.json"
MANIFEST = "manifest.json"
FOLDERS = (
    *("claims", "beats", "meetings", "deltas", "commits", "state", "initial", "kept", "inner"),
    *("unsynced", "live", "history", "journal"),
)
"""Everything else of a run lies below these."""
# Every number can be written in only one way, so that no two keys mean the same.
_EPOCH = r"(\d{4}|[1-9]\d{4,17})"
_DELTA = re.compile(
    rf"deltas/(\d{{8}})/(\d{{5}})\.{_EPOCH}\.(\d{{1,18}})-(\d{{1,18}})(?:\.([1-9]\d{{0,17}}))?"
    rf"\.([0-9a-f]{{16}})\.([0-9a-f]{{16}})\.([0-9a-f]{{1,16}})(?:\.({DIGITS}+))?\.safetensors",
    re.ASCII,
)
_HINT = re.compile(rf"deltas/(\d{{8}})/hint\.(\d{{5}})\.{_EPOCH}\.(join|leave|repair)", re.ASCII)
_WISH = re.compile(
    rf"deltas/(\d{{8}})/lr\.([1-9]\d{{0,8}})\.(\d{{5}})\.{_EPOCH}\.({DIGITS}+)\.([0-9a-f]{{16}})",
    re.ASCII,
)
_CLAIM = re.compile(rf"claims/(\d{{5}})/{_EPOCH}\.json", re.ASCII)
_COMMIT = re.compile(r"commits/(\d{8})\.json", re.ASCII)
_INNER = re.compile(rf"inner/(\d{{5}})/{_EPOCH}\.(\d{{8}})\.safetensors", re.ASCII)


def schema(run: str, job: SyncJob) -> str:
    """Return the part that the keys of all contributions to a fragment have in common.

    It is a digest of the run's name and of the fragment's fingerprint. It also enters the seeds of
    their checksums, which are made of the keys.
    """
    return fingerprint(run, job.fingerprint)[:16]


@dataclass(frozen=True, slots=True)
class Delta:
    """What the key of a contribution says.

    Attributes:
        sync: The sync that it is for.
        rank: The rank that made it.
        epoch: The incarnation of that rank.
        start: The first of the rank's inner steps that it covers.
        stop: One past the last of these steps.
        base: Digest of the fragment's state that it was made from.
        schema: Identifies the run and the fragment together; see :func:`schema`.
        groups: The groups of values that it carries, as a bit mask; the other groups are as in the
            state that it was made from.
        tokens: The tokens of these steps, in runs that weigh contributions by them. The key says
            nothing if there are none.
        rate: The digits of the outer learning rates that the sync takes if no replica has ever
            asked for others: in fixed runs whose rates are functions of the sync, rank 0 names
            them. Every replica that creates the record then writes the same one.
    """

    sync: int
    rank: int
    epoch: int
    start: int
    stop: int
    base: str
    schema: str
    groups: int = 1
    tokens: int = 0
    rate: str = ""

    @property
    def amount(self) -> Amount:
        """Return how much training it covers."""
        return Amount(self.stop - self.start, self.tokens)

    @property
    def key(self) -> str:
        """The key that says this."""
        incarnation_and_steps = f"{self.rank:05}.{self.epoch:04}.{self.start}-{self.stop}"
        if self.tokens:
            incarnation_and_steps += f".{self.tokens}"
        origin = f"{self.base}.{self.schema}.{self.groups:x}"
        if self.rate:
            origin += f".{self.rate}"
        return f"{deltas(self.sync)}{incarnation_and_steps}.{origin}.safetensors"

    @classmethod
    def parse(cls, key: str) -> Delta | None:
        """The contribution that a key names; None if it is not the key of a contribution."""
        match = _DELTA.fullmatch(key)
        if match is None:
            return None
        sync, rank, epoch, start, stop = map(int, match.groups()[:5])
        tokens, groups, rate = int(match[6] or 0), int(match[9], 16), match[10] or ""
        delta = cls(sync, rank, epoch, start, stop, match[7], match[8], groups, tokens, rate)
        return delta if delta.key == key and values_of(rate) is not None else None


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint to expect an incarnation in a sync, not to expect it any more, or to help it.

    The event is ``join``, ``leave`` or ``repair``.
    """

    sync: int
    rank: int
    epoch: int
    event: str

    @property
    def key(self) -> str:
        """The key that says this."""
        return f"{deltas(self.sync)}hint.{self.rank:05}.{self.epoch:04}.{self.event}"

    @classmethod
    def parse(cls, key: str) -> Hint | None:
        """The hint that a key gives; None if it is not the key of a hint."""
        match = _HINT.fullmatch(key)
        if match is None:
            return None
        sync, rank, epoch, event = match.groups()
        return cls(int(sync), int(rank), int(epoch), event)


def farewells(keys: Iterable[str]) -> list[Hint]:
    """The hints among these keys by which incarnations have said that they end."""
    hints = map(Hint.parse, keys)
    return [hint for hint in hints if hint is not None and hint.event == "leave"]


@dataclass(frozen=True, slots=True)
class Wish:
    """The wish of an incarnation for another outer learning rate from a sync on, as its key says.

    It is put before the incarnation's own contribution: a replica that sees one sees the other.

    Attributes:
        sync: The sync.
        rate: The rate that is asked for, with the rank and the epoch of the incarnation.
        schema: As in :class:`Delta`.
    """

    sync: int
    rate: Rate
    schema: str

    @property
    def key(self) -> str:
        """The key that says this."""
        rate = self.rate
        incarnation = f"{rate.number}.{rate.rank:05}.{rate.epoch:04}"
        return f"{deltas(self.sync)}lr.{incarnation}.{digits(rate.values)}.{self.schema}"

    @classmethod
    def parse(cls, key: str) -> Wish | None:
        """Parse a key; None if it is not that of a wish, or a rate is not a positive number."""
        match = _WISH.fullmatch(key)
        values = None if match is None else values_of(match[5])
        if match is None or values is None:
            return None
        sync, number, rank, epoch = map(int, match.groups()[:4])
        return cls(sync, Rate(values, number, rank, epoch), match[6])


def deltas(sync: int) -> str:
    """The folder of a sync's contributions."""
    return f"deltas/{sync:08}/"


def commit_key(sync: int) -> str:
    """Key of a commit record."""
    return f"commits/{sync:08}.json"


def claim_key(rank: int, epoch: int) -> str:
    """Key of an incarnation."""
    return f"claims/{rank:05}/{epoch:04}.json"


def beat_key(rank: int) -> str:
    """Key of a rank's sign of life."""
    return f"beats/{rank:05}"


def done_key(sync: int, fragment: int) -> str:
    """Key of the record that a fragment's state is complete."""
    return f"state/{sync:08}/{fragment:03}.done.json"


def shard_key(sync: int, fragment: int, shard: int, initial: str) -> str:
    """Key of a shard; ``initial`` is the manifest's nonce."""
    folder = f"state/{sync:08}" if sync else f"initial/{initial}"
    return f"{folder}/{fragment:03}.{shard:05}.safetensors"


def epochs(keys: Iterable[str], rank: int) -> list[int]:
    """The epochs of one rank that are claimed by these keys, in order. Other keys are ignored."""
    claims = [match for match in map(_CLAIM.fullmatch, keys) if match is not None]
    return sorted(int(match[2]) for match in claims if int(match[1]) == rank)


def highest_epochs(keys: Iterable[str]) -> dict[int, int]:
    """The highest epoch of every rank that is claimed by these keys."""
    highest: dict[int, int] = {}
    for match in filter(None, map(_CLAIM.fullmatch, keys)):
        rank, epoch = int(match[1]), int(match[2])
        highest[rank] = max(highest.get(rank, 0), epoch)
    return dict(sorted(highest.items()))


def is_claim(key: str) -> bool:
    """Say whether a key is that of a claim."""
    return _CLAIM.fullmatch(key) is not None


def commit_sync(key: str) -> int | None:
    """The number of the log record that has this key; None if it is not the key of a log record."""
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match else None


def inner_key(rank: int, epoch: int, sync: int) -> str:
    """Key of the inner state that an incarnation has saved.

    Keys are ordered by epoch first: what a later incarnation saves is always newer.
    """
    return f"inner/{rank:05}/{epoch:04}.{sync:08}.safetensors"


def parse_inner(key: str) -> tuple[int, int] | None:
    """Parse the key of a saved inner state into epoch and sync; None if it is not such a key."""
    match = _INNER.fullmatch(key)
    return (int(match[2]), int(match[3])) if match else None
