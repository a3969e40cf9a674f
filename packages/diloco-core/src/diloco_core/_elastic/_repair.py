"""Writing damaged objects of a run again, with the same content: to go back behind a commit would decide a sync twice.

A record is made from another one that holds the same, or from the memory of a life that has read it. A shard is computed
again from the state before and the contributions, and compared with what its record says of it.

A record of another run is no damage: reading it is an error that nothing here catches, and it stays as it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError
from .._wire._published import shard_metadata
from ._log._keys import Hint, commit_key, commit_sync, done_key
from ._log._records import Commit, Done, Rollback, digest
from ._round._reload import Reload, Why

if TYPE_CHECKING:
    from .._store._api import ObjectReader
    from .._wire._published import Sums
    from ._life._life import Life
    from ._life._progress import Progress

_ASKING = 4  # how often a record is looked at again while others are asked

_log = logging.getLogger("diloco_core")


def read_done(life: Life, sync: int, index: int) -> Done | None:
    """The record of a complete state; where it is damaged, it is made again from the commit and the verified shards.

    Raises:
        CorruptedObjectError: It is damaged, and cannot be made again.
    """
    key = done_key(sync, index)
    try:
        return life.done(sync, index)
    except CorruptedObjectError as error:
        done = _done_again(life, sync, index)
        if done is None:
            raise
        _say(life, key, error)
        life.store.put(key, lambda: [done.to_json()])
        return done


def readable_done(life: Life, sync: int, index: int) -> Done | None:
    """The record of a complete state, if it is there and can be read."""
    try:
        return life.done(sync, index)
    except CorruptedObjectError:
        return None


def read_commit(life: Life, sync: int, *, decided: bool = False) -> tuple[Commit, str] | None:
    """The record of a sync and its digest, if there is one. A damaged one is written again where that is possible.

    Args:
        life: Whose view it is.
        sync: Which sync.
        decided: The record is known to have been there.

    Raises:
        Reload: In its place the run went back to older states.
        CorruptedObjectError: It is damaged, and nothing here knows what it said.
    """
    try:
        entry = life.log(sync)
    except CorruptedObjectError as error:
        mended = commit_again(life, sync, error)
        if mended is None:
            raise
        return mended
    if entry is None and decided and commit_again(life, sync, None) is not None:
        entry = life.log(sync)
    if entry is None:
        return None
    record, of_record = entry
    if isinstance(record, Rollback):
        raise Reload(Why.WENT_BACK, record)
    return record, of_record


def commit_again(
    life: Life, sync: int, damage: CorruptedObjectError | None
) -> tuple[Commit, str] | None:
    """Write the record of a sync again that is damaged; None where nothing here knows what it said.

    Without ``damage`` it is gone, and what is there by now stays: without the record a rollback may have been decided.
    """
    index = life.index(sync)
    read, decided = life.fragments[index].commit, life.damage.decided
    commit = decided if decided is not None and decided.sync == sync else read
    if commit is None or commit.sync != sync:
        done = readable_done(life, sync, index)
        commit = done.commit if done is not None else None
    if commit is None:
        return None
    data = commit.to_json()
    _say(life, commit_key(sync), damage)
    if damage is None:
        life.store.create(commit_key(sync), lambda: data)
    else:
        life.store.put(commit_key(sync), lambda: [data])
    return commit, digest(data)


def rewrite_shard(
    life: Life, progress: Progress, sync: int, number: int, damage: object, done: Done | None = None
) -> Sums:
    """Write a shard of a state again from memory, which holds its values and its outer state.

    ``damage`` says what is wrong with what the store holds; None: nothing is there. ``done`` is the record of the state,
    where that is known already.

    Raises:
        CorruptedObjectError: Memory holds other values than were published.
    """
    index = life.index(sync)
    shard, key = life.shard(sync, index, number), life.key(sync, index, number)
    metadata = shard_metadata(progress.job, sync)
    sums = shard.sums(metadata)
    done = done or readable_done(life, sync, index)
    if done is not None and sums != (done.sums[number], done.rests[number]):
        raise computed_otherwise(life, key)
    _say(life, key, damage)
    life.store.put(key, lambda: shard.parts(metadata))
    return sums


def computed_otherwise(life: Life, key: str) -> CorruptedObjectError:
    """The error of a life that cannot make a damaged shard again."""
    return CorruptedObjectError(
        f"{life.origin(key)} or another object of its state is damaged, and what rank {life.rank} computes instead is not what "
        "it was: another kind of processor rounds differently. Resume the run on a machine like those that it ran on, or with "
        "resume='newest-whole'."
    )


def mend_published(life: Life, index: int) -> None:
    """Write those shards of the state in memory again that are damaged or gone in the store.

    Only what memory holds wholly is compared: values and outer state.
    """
    progress = life.fragments[index]
    done = readable_done(life, progress.sync, index)
    for number in range(progress.job.layout.shards):
        if progress.values_at[number] == progress.outer_at[number] == progress.sync:
            damage: CorruptedObjectError | None = None
            try:
                if check_shard(life, progress.sync, index, number, done) is not None:
                    continue
            except CorruptedObjectError as error:
                damage = error
            rewrite_shard(life, progress, progress.sync, number, damage)


def commit_mended(life: Life, sync: int) -> tuple[Commit, str] | None:
    """The record of a sync, as :func:`read_commit`; where it is damaged, others are asked and waited for, for a grace.

    Whoever has created it or read it can write it again, and so can everybody once the state after it is complete.

    Raises:
        CorruptedObjectError: It is damaged, and nobody has written it again.
    """
    try:
        return read_commit(life, sync)
    except CorruptedObjectError as error:
        left = error
    grace = life.settings.grace
    _log.error(
        "rank %d: %s. Asking the other replicas to write it again, for %g s.",
        life.rank,
        str(left).rstrip("."),
        grace,
    )
    ask_for_repair(life)
    for _ in range(_ASKING):
        life.timing.sleep(grace / _ASKING)
        try:
            return read_commit(life, sync)
        except CorruptedObjectError as error:
            left = error
    raise left


def ask_for_repair(life: Life) -> None:
    """Ask those that live for what this life cannot read: they see it where they look for contributions."""
    newest = max(filter(None, map(commit_sync, life.store.list("commits/"))), default=0)
    for sync in sorted({newest, newest + 1} - {0}):
        life.store.put(Hint(sync, life.rank, life.epoch, "repair").key, lambda: [b"\n"])


def answer(life: Life) -> None:
    """Compare what this life knows for certain with what the store holds, and write again what is damaged there."""
    _mend_rollback(life)
    for index, progress in enumerate(life.fragments):
        commit = progress.commit
        if commit is None:
            continue
        read_commit(life, commit.sync, decided=True)
        if life.published(progress.sync):
            mend_published(life, index)
            _mend_done(life, index)


def _mend_rollback(life: Life) -> None:
    for rollback, _ in life.rollbacks[-1:]:
        key = commit_key(rollback.sync)
        try:
            life.log(rollback.sync)
        except CorruptedObjectError as error:
            _say(life, key, error)
            life.store.put(key, lambda: [rollback.to_json()])  # noqa: B023 - called at once


def _mend_done(life: Life, index: int) -> None:
    sync = life.fragments[index].sync
    if life.store.get(done_key(sync, index)) is not None:
        try:
            read_done(life, sync, index)
        except CorruptedObjectError as error:
            _log.error("rank %d: %s", life.rank, error)


def _done_again(life: Life, sync: int, index: int) -> Done | None:
    entry = read_commit(life, sync, decided=True)
    if entry is None:
        return None
    sums: list[Sums] = []
    for number in range(life.fragments[index].job.layout.shards):
        try:
            stored = check_shard(life, sync, index, number)
        except CorruptedObjectError:
            return None
        if stored is None:
            return None
        sums.append(stored)
    return Done(sync, index, tuple(s.values for s in sums), tuple(s.rest for s in sums), entry[0])


def check_shard(
    life: Life, sync: int, index: int, number: int, done: Done | None = None
) -> Sums | None:
    """Read all of a published shard and verify it; None where it is not there.

    Raises:
        CorruptedObjectError: It is damaged, or is not what the record ``done`` says.
    """
    key, shard = life.key(sync, index, number), life.shard(sync, index, number)

    def use(reader: ObjectReader) -> Sums:
        return shard.check(reader, life.origin(key), life.scratch, whole=True)

    sums = life.again(lambda: life.store.read(key, use))
    if sums is not None and done is not None and sums != (done.sums[number], done.rests[number]):
        raise CorruptedObjectError(
            f"{life.origin(key)} is whole, but is not what the record of its sync says"
        )
    return sums


def _say(life: Life, key: str, damage: object) -> None:
    """Tell what is written again and why: ``damage`` says what is wrong with it, None that it is gone."""
    why = "it is gone" if damage is None else f"it is damaged: {damage}"
    _log.error("rank %d: writing %s again with the same content, because %s", life.rank, key, why)
