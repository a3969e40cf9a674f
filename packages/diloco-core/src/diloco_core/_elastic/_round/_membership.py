"""Who is in a sync: what a life decides when it has looked at the contributions, and when it has read the record.

These are steps 6 to 10 and 13 of the protocol. Nothing here reads a store or a clock: what was listed, what was read and whose
time is up come in as values, so that every order of events can be tried. The rules themselves are in :mod:`.._log._rules`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .._log._keys import Delta
from .._log._rules import expected, may_commit, valid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .._log._records import Commit

Fate = Literal["none", "counted", "carried", "dropped"]


@dataclass(frozen=True, slots=True)
class Round:
    """What a life knows of a sync that it waits for. None of it changes while it waits.

    Attributes:
        sync: Number of the sync.
        rank: Rank of the life.
        base: Digest of the fragment's state that this life holds, which the sync starts from.
        schema: Name of the run and the fragment, as in the keys of their contributions.
        positions: Inner steps of every rank that are counted in that state.
        size: How many bytes a contribution of certain groups must have; None where no contribution has these groups.
        previous: Digest of the record before this sync's; empty where it is not known.
        members: Epoch by rank of that record's members.
        absent: Those of them that did not do their part after it.
        former: Hints that do not count; see :func:`.._log._rules.former_farewells`.
        min_replicas: The quorum.
        differed: Whether this life has started again because its state was not that of the others, and completed no sync since.
        may_leave: Whether it may go without the sync: a last one for which too few replicas are left.
    """

    sync: int
    rank: int
    base: str
    schema: str
    positions: Mapping[int, int]
    size: Callable[[int], int | None]
    previous: str
    members: Mapping[int, int]
    min_replicas: int
    absent: Collection[int] = ()
    former: Collection[str] = ()
    differed: bool = False
    may_leave: bool = False

    def valid(self, listing: Mapping[str, int]) -> dict[int, Delta]:
        """At most one contribution per rank that counts from this life's state; see :func:`.._log._rules.valid`."""
        return valid(
            listing, base=self.base, schema=self.schema, positions=self.positions, size=self.size
        )


@dataclass(frozen=True, slots=True)
class Folder:
    """What a listing of a sync's folder says to a life.

    Attributes:
        chosen: The contributions that count from its state, at most one per rank, in rank order.
        elsewhere: Ranks that contributed from another state, and the digest of that.
        missing: Ranks that are waited for, in order.
    """

    chosen: Mapping[int, Delta]
    elsewhere: Mapping[int, str]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Nothing is to be done yet."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create the record of the sync, then read it and obey what is there: another life may have been faster.

    Attributes:
        members: The contributions that it names.
    """

    members: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Go without the sync.

    Attributes:
        just_looked: Whether the record was looked for just before. If not, it may be there by now, and is obeyed then.
    """

    just_looked: bool


@dataclass(frozen=True, slots=True)
class Differ:
    """Start again from what is published: this life's state is not that of the others.

    Attributes:
        theirs: Digest of the state that they hold.
    """

    theirs: str


@dataclass(frozen=True, slots=True)
class Expired:
    """Too few replicas contributed in time: end with an error. Nothing was decided."""


@dataclass(frozen=True, slots=True)
class Obey:
    """The record follows the state that this life holds: adopt what it says, whoever is in it."""


@dataclass(frozen=True, slots=True)
class NotNext:
    """The record does not follow the one that this life stands at."""


Decision = KeepWaiting | Create | Leave | Differ | Expired


def read_folder(at: Round, listing: Mapping[str, int]) -> Folder:
    """What a listing of the sync's folder says: which contributions count, and who is waited for.

    Who has contributed from another state is not waited for: what it sent will never count here.
    """
    chosen = at.valid(listing)
    newest: dict[int, Delta] = {}
    for delta in filter(None, map(Delta.parse, listing)):
        if delta.schema == at.schema and newest.get(delta.rank, delta).epoch <= delta.epoch:
            newest[delta.rank] = delta
    elsewhere = {
        rank: delta.base
        for rank, delta in newest.items()
        if rank not in chosen and delta.base != at.base
    }
    waited_for = expected(at.members, listing, at.absent, at.former) - elsewhere.keys()
    return Folder(chosen, elsewhere, tuple(sorted(waited_for - chosen.keys())))


def on_look(at: Round, folder: Folder | None, *, overdue: bool, expired: bool) -> Decision:
    """What a life does that waits for a record which is not there yet.

    Args:
        at: What it knows.
        folder: What it has just listed; None where it is only seeing to its time.
        overdue: Whether a grace has passed since it contributed: nobody is waited for any more.
        expired: Whether it has waited as long as it may.
    """
    if folder is not None:
        if overdue or not folder.missing:
            # A life with another state than most must not decide: its record would be of a state that nobody else holds.
            theirs = _other_state(at, folder)
            if theirs is not None:
                return Differ(theirs)
        if may_commit(
            folder.chosen,
            set(folder.missing),
            rank=at.rank,
            min_replicas=at.min_replicas,
            overdue=overdue,
        ):
            return Create(tuple(folder.chosen.values()))
        if at.may_leave and not folder.missing:
            return Leave(just_looked=False)  # nobody is left who could make up the quorum
    if not expired:
        return KeepWaiting()
    return Leave(just_looked=True) if at.may_leave else Expired()


def on_record(at: Round, commit: Commit, *, follows: bool) -> Obey | Differ | NotNext:
    """What a life does that has read the record of the sync.

    Every life obeys it, also one that it leaves out, and one that would have named others: there is one record, and whoever
    went by a list of its own would come to a state that nobody else holds.

    Args:
        at: What it knows.
        commit: The record.
        follows: Whether it is the next one after the one that the life stands at, and counts on from there.
    """
    if commit.base != at.base and (commit.sync, commit.previous) == (at.sync, at.previous):
        return Differ(commit.base)
    return Obey() if follows else NotNext()


def fate(commit: Commit, rank: int, own: Delta | None, *, learned: bool, late: str) -> Fate:
    """What becomes of what a life has learned since the fragment's last sync.

    Carried only where the record names no life of the rank: another one covers the same data, which must not count again.

    Args:
        commit: The record that it obeys.
        rank: Its rank.
        own: Its contribution, if it made one.
        learned: Whether it has learned anything.
        late: Its setting for what came too late.
    """
    if not learned:
        return "none"
    for member in commit.members:
        if member.rank == rank:
            return "counted" if member == own else "dropped"
    return "carried" if late == "carry" else "dropped"


def _other_state(at: Round, folder: Folder) -> str | None:
    """Digest of the state that this life should hold instead of its own; None where it need not start again.

    Only in the gather topology do replicas compute for themselves. Where there is no majority, everybody starts again from
    what is published, once: who still differs then is not believed.
    """
    if not folder.elsewhere:
        return None
    bases = {**dict.fromkeys(folder.chosen, at.base), **folder.elsewhere}
    ((most, count),) = Counter(bases.values()).most_common(1)
    if 2 * count <= len(bases):
        return None if at.differed else next(iter(folder.elsewhere.values()))
    return None if most == at.base else most
