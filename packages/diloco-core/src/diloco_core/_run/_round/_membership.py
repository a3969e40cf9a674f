"""The decision which ranks are in a sync.

An incarnation decides after it has listed the contributions, and after it has read the record.

These are steps 6 to 10 and 13 of the protocol. Nothing here reads a store or a clock: what was
listed, what was read and whether time is up are passed in, so that tests can try every order of
events. Further rules are in :mod:`.._records._rules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from .._records._keys import Delta
from .._records._records import Commit
from .._records._rules import expected

Fate = Literal["none", "counted", "carried", "dropped"]


@dataclass(frozen=True, slots=True)
class Round:
    """What an incarnation knows about a sync that it waits for. None of it changes while it waits.

    Attributes:
        sync: Number of the sync.
        rank: Rank of the incarnation.
        base: Digest of the fragment's state that this incarnation holds. For this incarnation, the
            sync starts from that state.
        schema: Identifies the run and the fragment in the keys of contributions.
        positions: The inner steps that are counted in that state, by rank.
        size: Returns the size in bytes of a rank's contribution that carries these groups; None if
            none may carry them.
        previous: Digest of the record before this sync's record; empty if it is not known.
        members: The members of that earlier record, as epoch by rank.
        absent: Those of these members that did not do their part after that record.
        former: Hints that do not count; see :func:`.._records._rules.former_farewells`.
        min_replicas: The quorum.
        differed: Whether this incarnation has started again because its state differed from the
            others', and completed no sync since.
        may_leave: Whether it may do without a last sync for which too few replicas are left.
        everybody: In fixed runs: all ranks, each of which is waited for; it may contribute without
            having taken a step.
    """

    sync: int
    rank: int
    base: str
    schema: str
    positions: Mapping[int, int]
    size: Callable[[int, int], int | None]
    previous: str
    members: Mapping[int, int]
    min_replicas: int
    absent: Collection[int] = ()
    former: Collection[str] = ()
    differed: bool = False
    may_leave: bool = False
    everybody: Collection[int] = ()

    def valid(self, listing: Mapping[str, int]) -> dict[int, Delta]:
        """At most one valid contribution per rank, that of its highest epoch, in rank order.

        A contribution is valid if it was made from the state that the sync starts from, covers
        inner steps that have not been counted yet, and is complete.

        Args:
            listing: Keys and sizes under the sync's folder.
        """
        newest: dict[int, Delta] = {}
        empty = bool(self.everybody)  # whether a contribution may cover no steps
        for key, stored_size in listing.items():
            delta = Delta.parse(key)
            if (
                delta is None
                or (delta.base, delta.schema) != (self.base, self.schema)
                or stored_size != self.size(delta.groups, delta.rank)
            ):
                continue
            if not self.positions.get(delta.rank, 0) <= delta.start < delta.stop + empty:
                continue
            other = newest.get(delta.rank)
            if other is None or other.epoch < delta.epoch:
                newest[delta.rank] = delta
        return dict(sorted(newest.items()))

    def may_commit(self, folder: Folder, *, overdue: bool) -> bool:
        """Say whether the incarnation may create the commit record.

        Its rank has to have contributed, the quorum to be there, and no rank to be waited for.
        """
        chosen = folder.chosen
        enough = self.rank in chosen and len(chosen) >= self.min_replicas
        return enough and (overdue or not folder.missing)


@dataclass(frozen=True, slots=True)
class Folder:
    """What an incarnation learns from a listing of a sync's folder.

    Attributes:
        chosen: The contributions that count for the incarnation's state, at most one per rank, in
            rank order.
        elsewhere: Ranks that contributed from another state, with the digest of that state.
        missing: Ranks that are waited for, in order.
        listing: The keys that were listed.
    """

    chosen: Mapping[int, Delta]
    elsewhere: Mapping[int, str]
    missing: tuple[int, ...]
    listing: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """There is nothing to do yet."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create the record of the sync, then read the record and obey it.

    Another incarnation may have been faster.

    Attributes:
        members: The contributions that the record is to name.
    """

    members: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Continue without the sync.

    Attributes:
        just_looked: Whether the incarnation has just looked for the record. If not, the record may
            be there by now; then it is obeyed.
    """

    just_looked: bool


@dataclass(frozen=True, slots=True)
class Differ:
    """Start again from the published state, because the others hold another state.

    Attributes:
        theirs: Digest of the state that the others hold.
    """

    theirs: str


@dataclass(frozen=True, slots=True)
class Expired:
    """End with an error, because too few replicas contributed in time. Nothing was decided."""


@dataclass(frozen=True, slots=True)
class Obey:
    """Adopt what the record says, whichever ranks are in it.

    The record follows the state that this incarnation holds.
    """


@dataclass(frozen=True, slots=True)
class NotNext:
    """The record does not follow the last one that this incarnation has obeyed."""


Decision = KeepWaiting | Create | Leave | Differ | Expired


def read_folder(at: Round, listing: Mapping[str, int]) -> Folder:
    """Read from a sync's listing which contributions count, and which ranks are waited for.

    A rank that has contributed from another state is not waited for: its contribution will never
    count for this incarnation's state.
    """
    chosen = at.valid(listing)
    if at.everybody:
        chosen = {rank: delta for rank, delta in chosen.items() if rank in at.everybody}
    newest: dict[int, Delta] = {}
    for delta in filter(None, map(Delta.parse, listing)):
        if delta.schema == at.schema and newest.get(delta.rank, delta).epoch <= delta.epoch:
            newest[delta.rank] = delta
    others = {rank: delta.base for rank, delta in newest.items() if rank not in chosen}
    elsewhere = {rank: base for rank, base in others.items() if base != at.base}
    waited_for = set(at.everybody)
    if not waited_for:
        waited_for = expected(at.members, listing, at.absent, at.former) - elsewhere.keys()
    return Folder(chosen, elsewhere, tuple(sorted(waited_for - chosen.keys())), listing.keys())


def on_look(at: Round, folder: Folder | None, *, overdue: bool, expired: bool) -> Decision:
    """Return what an incarnation does while it waits for a record that is not there yet.

    Args:
        at: What the incarnation knows.
        folder: What it has just listed; None if it has only checked the time.
        overdue: Whether a grace has passed since it contributed, after which no rank is waited for.
        expired: Whether it has waited as long as it may.
    """
    if folder is not None:
        if overdue or not folder.missing:
            # An incarnation with another state than most must not decide: its record would start
            # from a state that no other incarnation holds.
            theirs = _other_state(at, folder)
            if theirs is not None:
                return Differ(theirs)
        if at.may_commit(folder, overdue=overdue):
            return Create(tuple(folder.chosen.values()))
        if at.may_leave and not folder.missing:
            return Leave(just_looked=False)  # no rank is left that could make up the quorum
    if not expired:
        return KeepWaiting()
    return Leave(just_looked=True) if at.may_leave else Expired()


def on_record(at: Round, commit: Commit, *, follows: bool) -> Obey | Differ | NotNext:
    """Return what an incarnation does after it has read the record of the sync.

    Every incarnation obeys the record, even if the record leaves it out, or names other members
    than the incarnation itself would have named: there is only one record, and an incarnation that
    used a list of its own would come to a state that no other incarnation holds.

    Args:
        at: What the incarnation knows.
        commit: The record.
        follows: Whether the record directly follows the last one that the incarnation has obeyed,
            and continues its counts.
    """
    if commit.base != at.base and (commit.sync, commit.previous) == (at.sync, at.previous):
        return Differ(commit.base)
    return Obey() if follows else NotNext()


def fate(commit: Commit, rank: int, own: Delta | None, *, learned: bool, late: str) -> Fate:
    """Return what becomes of what an incarnation has learned since the fragment's last sync.

    It is carried to the next sync only if the record names no incarnation of the rank. If it names
    another incarnation, that one covers the same data, which must not count twice.

    Args:
        commit: The record that the incarnation obeys.
        rank: Its rank.
        own: Its contribution; None if it made none.
        learned: Whether it has learned anything.
        late: Its setting for contributions that came too late.
    """
    if not learned:
        return "none"
    for member in commit.members:
        if member.rank == rank:
            return "counted" if member == own else "dropped"
    return "carried" if late == "carry" else "dropped"


def _other_state(at: Round, folder: Folder) -> str | None:
    """Return the digest of the state that this incarnation should hold instead of its own.

    None if it need not start again.

    States can differ only in the gather topology, where every replica computes them itself. If no
    state has a majority, all incarnations start again from what is published, but only once: an
    incarnation that still differs then is not believed.
    """
    if not folder.elsewhere:
        return None
    bases = {**dict.fromkeys(folder.chosen, at.base), **folder.elsewhere}
    ((most_common, count),) = Counter(bases.values()).most_common(1)
    if 2 * count <= len(bases):
        return None if at.differed else next(iter(folder.elsewhere.values()))
    return None if most_common == at.base else most_common
