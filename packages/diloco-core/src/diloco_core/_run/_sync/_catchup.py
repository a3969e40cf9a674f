"""Catching up with the log: the newest published state, then every sync committed after it."""

from __future__ import annotations

from functools import partial

from ..._errors import (
    CorruptedObjectError,
    DivergedError,
    NonFiniteUpdateError,
    StoreUnavailableError,
)
from ..._store._api import ObjectReader
from ..._store._reread import list_folders, open_ahead
from .._incarnation._incarnation import Incarnation
from .._records._keys import commit_key
from .._records._records import Rollback
from .._records._rules import in_force, states
from .._repair import asking, mend_published, read_commit
from .._round._reload import ReloadError, Why
from .._states._load import begin_to_hold, hold, load
from .._states._rollback import obey_rollback, roll_back
from ._adopt import Adoption
from ._compute import make_again
from ._fork import check_not_later

_PAUSES = (0.0, 0.1, 0.4, 1.5, 1.5)  # seconds after each attempt whose state could not be used
_ASKING = 2  # how often loading is tried again while other replicas are asked to repair
_MOST_ROLLBACKS = 3


def catch_up(incarnation: Incarnation, *, first: bool = False) -> None:
    """Take the newest state in the store, finishing what is undone and mending what is damaged.

    Args:
        incarnation: The incarnation.
        first: Whether the incarnation begins here. Only then may it go back to older states, if its
            settings allow that.

    Raises:
        CorruptedObjectError: The store does not hold what its records promise.
        DivergedError: Replaying the log gives other values than the others had.
        NonFiniteUpdateError: A sync that is committed would make a tensor NaN or infinite.
    """
    for progress in incarnation.fragments:
        progress.job.begin()
    error = _take_newest(incarnation)
    if error is not None:
        _take_mended(incarnation, error, first=first)
    for progress in incarnation.fragments:
        progress.job.finish()


def start_again(incarnation: Incarnation, reload: ReloadError) -> None:
    """Take what is published, because this incarnation cannot use the state that it holds.

    Raises:
        DivergedError: The incarnation's state is wrong although it has started again before for
            that reason.
        FencedError: The run went back to older states, and this incarnation had not agreed to that.
    """
    if reload.rollback is not None:
        obey_rollback(incarnation, reload.rollback)
    if reload.why is Why.DIFFERS:
        if incarnation.handover.differed:
            raise diverged(incarnation.rank)
        incarnation.handover.differed = True
    elif reload.damage is not None:
        incarnation.say.warning(
            "%s. Reloading the published state.", str(reload.damage).rstrip(".")
        )
    last_rollback = incarnation.rollback
    catch_up(incarnation)
    # Loading may have met a rollback that this incarnation had not seen in the log.
    if incarnation.rollback > last_rollback:
        record = incarnation.log(incarnation.rollback)
        if isinstance(record, Rollback):
            obey_rollback(incarnation, record)


def _take_mended(
    incarnation: Incarnation, error: CorruptedObjectError | NonFiniteUpdateError, *, first: bool
) -> None:
    """Ask other replicas to mend what this incarnation cannot read, and wait for a grace.

    Afterwards go back to older states, if that is agreed.
    """
    problem: CorruptedObjectError | NonFiniteUpdateError | None = error
    # If a committed sync would make a tensor infinite, it would do so on every replica, so asking
    # would not help.
    for _ in asking(incarnation, error, _ASKING) if isinstance(error, CorruptedObjectError) else ():
        problem = _take_newest(incarnation)
        if problem is None:
            return
    may_go_back = first and incarnation.settings.resume == "newest-whole"
    for _ in range(_MOST_ROLLBACKS if may_go_back else 0):
        roll_back(incarnation, problem or error)
        problem = _take_newest(incarnation)
        if problem is None:
            return
    raise problem or error


def _take_newest(incarnation: Incarnation) -> CorruptedObjectError | NonFiniteUpdateError | None:
    """Load the newest state and replay the log.

    Returns None, or the error that says what could not be read or computed.
    """
    damage: CorruptedObjectError | StoreUnavailableError | None = None
    why = None
    for pause in _PAUSES:
        try:
            load(incarnation)
            replay(incarnation)
            for index in range(len(incarnation.fragments)):
                _hold_own_part(incarnation, index)
        except ReloadError as reload:
            damage, why = reload.damage, reload.why
        except (CorruptedObjectError, NonFiniteUpdateError) as error:
            return error
        else:
            return None
        incarnation.timing.sleep(pause)
    if why is Why.DIFFERS and damage is None:
        raise diverged(incarnation.rank)
    if isinstance(damage, StoreUnavailableError):
        raise damage
    return damage or CorruptedObjectError(
        f"the state in {incarnation.store.uri} changed each of the {len(_PAUSES)} times that it "
        "was read: start this replica again"
    )


def replay(incarnation: Incarnation) -> None:
    """Adopt every sync that is committed and not adopted yet."""
    # A published state shows that its sync was decided, even if the record is gone.
    published = max((sync for sync, _ in states(incarnation.store.list("state/"))), default=0)
    rollbacks = incarnation.standing.rollbacks
    turns = {rollback.sync: rollback for rollback in rollbacks}
    while True:
        sync = incarnation.sync + 1
        if sync in turns:
            if not incarnation.standing.holds(turns[sync]):
                raise ReloadError(Why.WENT_BACK, turns[sync])
            incarnation.standing.turn_back(turns[sync])
            continue
        if not in_force(sync, incarnation.index(sync), rollbacks):
            incarnation.standing.pass_over(sync)
            continue
        commit = read_commit(incarnation, sync, decided=incarnation.sync < published)
        if commit is None:
            break
        if not incarnation.standing.follows(commit):
            raise incarnation.does_not_follow(commit)
        progress = incarnation.fragments[commit.fragment]
        if commit.sync <= progress.sync:
            incarnation.standing.skip(commit)
            continue
        if incarnation.fixed:
            check_not_later(incarnation, commit)
        if commit.base != progress.digest:
            # A shard that was deleted may have been created again with other bytes; a newer state
            # is whole then.
            raise ReloadError(Why.DIFFERS)
        Adoption(incarnation, commit, local=False).run()
        incarnation.standing.advance(commit)
        if incarnation.damage.mending.get(commit.fragment) == commit.sync:
            mend_published(incarnation, commit.fragment)
            incarnation.damage.mended(commit.fragment, commit.sync)
    # Several records in a row may be lost. The next one may just have been decided: read it again.
    newest = max(incarnation.recorded(), default=0)
    has_gap = newest > incarnation.sync + 1 and incarnation.log(incarnation.sync + 1) is None
    if incarnation.sync < published or has_gap:
        raise CorruptedObjectError(
            f"{incarnation.origin(commit_key(incarnation.sync + 1))} is gone, although later "
            "objects are there. A run never deletes commit records: something else has deleted it, "
            "or a replica of another run writes below this prefix"
        )


def _hold_own_part(incarnation: Incarnation, index: int) -> None:
    """Read the outer optimizer's state of every N-th shard of a fragment, which this rank updates.

    These are the shards that it updates if all N ranks take part, so their state need not be read
    at the next sync. This also shows damage before any replica trains: loading reads only the
    values, but if all ranks are there, each part of the rest is read by one of them. What is
    damaged is made again at once.

    Raises:
        ReloadError: It is damaged, and the whole state has to be made again.
    """
    if incarnation.gather:
        return  # loading has read everything
    progress, store = incarnation.fragments[index], incarnation.store
    shards = range(incarnation.rank, progress.job.layout.shards, incarnation.manifest.world_size)
    own_shards = {
        incarnation.key(progress.sync, index, shard): shard
        for shard in shards
        if begin_to_hold(incarnation, progress, shard)
    }
    listing = {} if store.near else list_folders(store.list, own_shards)
    sizes = {key: listing.get(key) for key in own_shards}

    def announce(key: str, reader: ObjectReader) -> None:
        incarnation.shard(progress.sync, index, own_shards[key]).announce_rest(reader)

    with open_ahead(store.store, sizes, announce) as readers:
        for (key, shard), reader in zip(own_shards.items(), readers, strict=True):
            _hold_or_make_again(incarnation, index, shard, key, reader)


def _hold_or_make_again(
    incarnation: Incarnation, index: int, shard: int, key: str, opened: ObjectReader | None
) -> None:
    """Read what memory lacks of a shard. If its file is damaged or gone, make the shard again.

    Raises:
        ReloadError: The shard could not be made again by itself.
    """
    progress = incarnation.fragments[index]
    damage: CorruptedObjectError | None = None
    try:
        # Only two attempts, since the others may be waiting. If the file is not damaged after all,
        # the same is computed again.
        if incarnation.read_file(key, partial(hold, incarnation, progress, shard), opened, most=2):
            return
    except CorruptedObjectError as error:
        damage = error
        progress.forget_outer(shard, incarnation.chunk_bytes)
    if incarnation.newest_done()[index] > progress.sync:
        return  # it was deleted while it was read, because the others have gone on
    if make_again(incarnation, index, shard, damage):
        return
    damage = damage or CorruptedObjectError(f"{incarnation.origin(key)} is gone")
    incarnation.damage.distrust(index, progress.sync, damage)
    raise ReloadError(Why.DAMAGED, damage=damage)


def diverged(rank: int) -> DivergedError:
    """The error for a replica that computes other values than the others."""
    return DivergedError(
        f"rank {rank} holds other values than most other replicas, even after it has loaded the "
        "published state. If this machine's memory is faulty, resume the run on another one. In "
        "gather, different kinds of processors round differently: run all replicas on the same "
        "kind, or begin a new run with topology='sharded', where every shard is computed once and "
        "all replicas read the same bytes."
    )
