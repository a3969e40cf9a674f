"""Writing damaged objects of a run again, with the same content.

The content must be the same, because going back behind a commit would mean deciding its sync twice. A record is made from
another record that holds the same fields, or from the memory of a life that has read it. A shard is computed again from the
previous state and the contributions, and compared with what its record says about it.

A record of another run does not count as damage: reading it is an error that nothing here catches, and it is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from .._errors import CorruptedObjectError
from .._store._api import ObjectReader
from .._wire._published import Sums, shard_metadata
from ._life._life import Life
from ._life._progress import Progress, publishes_whole
from ._records._keys import Hint, commit_key, done_key
from ._records._records import Commit, Done, Rollback, digest
from ._round._reload import ReloadError, Why

_ASKING = 4  # how often a record is read again while other replicas are asked to repair it


def read_done(life: Life, sync: int, index: int) -> Done | None:
    """The record of a complete state. If it is damaged, it is made again from the commit record and the verified shards.

    Returns:
        The record; None if there is none.

    Raises:
        CorruptedObjectError: It is damaged, and cannot be made again.
        ReloadError: The run has gone back to older states.
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
    """The record of a complete state; None if it does not exist or cannot be read."""
    try:
        return life.done(sync, index)
    except CorruptedObjectError:
        return None


def read_commit(life: Life, sync: int, *, decided: bool = False) -> tuple[Commit, str] | None:
    """The record of a sync and its digest. A damaged record is written again if that is possible.

    Args:
        life: The life that reads it.
        sync: The sync.
        decided: Whether the record is known to have existed, so that it is lost if it is not there.

    Returns:
        The two; None if there is no record.

    Raises:
        CorruptedObjectError: It is damaged, and neither this life nor the store knows what it said.
        ReloadError: There is a rollback in its place: the run has gone back to older states.
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
    record, record_digest = entry
    if isinstance(record, Rollback):
        raise ReloadError(Why.WENT_BACK, record)
    return record, record_digest


def commit_again(
    life: Life, sync: int, damage: CorruptedObjectError | None
) -> tuple[Commit, str] | None:
    """Write the damaged record of a sync again; None if neither this life nor the store knows what it said.

    If ``damage`` is None, the record is lost. If there is another record in its place by now, that one stays: while the record
    was missing, a rollback may have been decided.
    """
    index = life.index(sync)
    adopted, decided = life.fragments[index].commit, life.damage.decided
    commit = decided if decided is not None and decided.sync == sync else adopted
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
    life: Life,
    progress: Progress,
    sync: int,
    number: int,
    damage: object,
    done: Done | None = None,
) -> Sums:
    """Write a shard of a state again from memory, which must hold its values and its outer state. Returns its checksums.

    ``damage`` says what is wrong with the shard in the store; None means that it is gone. ``done`` is the record of the state,
    if the caller knows it already.

    Raises:
        CorruptedObjectError: Memory holds other values than those that were published.
    """
    key, shard = life.file(progress, number, sync)
    metadata = (
        progress.metadata(number) if sync == progress.sync else shard_metadata(progress.job, sync)
    )
    sums = shard.sums(metadata)
    done = done or readable_done(life, sync, progress.index)
    if done is not None and sums != (done.sums[number], done.rests[number]):
        raise computed_otherwise(life, key)
    _say(life, key, damage)
    life.store.put(key, lambda: shard.parts(metadata))
    return sums


def computed_otherwise(life: Life, key: str) -> CorruptedObjectError:
    """The error of a life that computes other values than those of a damaged shard, and so cannot replace it."""
    return CorruptedObjectError(
        f"{life.origin(key)} or another object of its state is damaged, and rank {life.rank} cannot replace it, because the "
        "values that it computes are not the same: different kinds of processors round differently. Resume the run on a machine "
        "with the same kind of processor as before, or with resume='newest-whole'."
    )


def mend_published(life: Life, index: int) -> None:
    """Check the published shards of the state in memory, and write those again that are damaged or gone.

    Only shards of which memory holds both the values and the outer state are checked, and of encoded state only those that this
    life has computed itself.
    """
    progress = life.fragments[index]
    done = readable_done(life, progress.sync, index)
    for number in range(progress.job.layout.shards):
        in_memory = progress.values_at[number] == progress.outer_at[number] == progress.sync
        if in_memory and life.shard(progress.sync, index, number).writable:
            mend_shard(life, progress, number, done)


def mend_shard(life: Life, progress: Progress, number: int, done: Done | None) -> None:
    """Check the file of a shard whose values and outer state memory holds; if it is damaged or gone, write it again.

    Raises:
        CorruptedObjectError: Memory holds other values than those that were published.
    """
    damage: CorruptedObjectError | None = None
    try:
        if check_shard(life, progress.sync, progress.index, number, done) is not None:
            return
    except CorruptedObjectError as error:
        damage = error
    rewrite_shard(life, progress, progress.sync, number, damage, done)


def commit_mended(life: Life, sync: int) -> tuple[Commit, str] | None:
    """The record of a sync, as :func:`read_commit`. If it is damaged, this asks the other replicas, and waits for a grace.

    A replica that has created or read the record can write it again; and every replica can, once the state after the sync is
    complete.

    Raises:
        CorruptedObjectError: It is damaged, and no replica has written it again.
    """
    try:
        return read_commit(life, sync)
    except CorruptedObjectError as error:
        last_error = error
    for _ in asking(life, last_error, _ASKING):
        try:
            return read_commit(life, sync)
        except CorruptedObjectError as error:
            last_error = error
    raise last_error


def asking(life: Life, damage: CorruptedObjectError, times: int) -> Iterator[None]:
    """Ask the other replicas to write again what cannot be read, and wait for a grace; this yields when to try again."""
    grace = life.settings.grace
    life.say.error(
        "%s. Asking the other replicas to write it again, and waiting for them for %g s.",
        str(damage).rstrip("."),
        grace,
    )
    ask_for_repair(life)
    for _ in range(times):
        life.timing.sleep(grace / times)
        yield


def ask_for_repair(life: Life) -> None:
    """Ask running replicas to repair what this life cannot read. They see the request where they look for contributions."""
    newest = max(life.recorded(), default=0)
    for sync in sorted({newest, newest + 1} - {0}):
        life.store.put(Hint(sync, life.rank, life.epoch, "repair").key, lambda: [b"\n"])


def answer(life: Life) -> None:
    """Answer a request for repair: compare what this life knows for certain with the store, and write damaged objects again.

    Raises:
        ReloadError: The run has gone back to older states.
    """
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
    for rollback, _ in life.standing.rollbacks[-1:]:
        key = commit_key(rollback.sync)
        try:
            life.log(rollback.sync)
        except CorruptedObjectError as error:
            _say(life, key, error)
            life.store.put(key, lambda: [rollback.to_json()])  # noqa: B023 - called at once


def _mend_done(life: Life, index: int) -> None:
    sync = life.fragments[index].sync
    if life.store.peek(done_key(sync, index)) is None:
        return
    try:
        read_done(life, sync, index)
    except CorruptedObjectError as error:
        life.say.error("%s", error)


def _done_again(life: Life, sync: int, index: int) -> Done | None:
    """Make the record of a complete state from the commit record and the shards; None if one of these is gone or damaged."""
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
    values, rests = zip(*sums, strict=True)
    full = publishes_whole(life.fragments[index].job, sync)
    return Done(sync, index, values, rests, entry[0], full)


def check_shard(
    life: Life, sync: int, index: int, number: int, done: Done | None = None
) -> Sums | None:
    """Read the whole file of a published shard and verify it. Returns its checksums; None if it does not exist.

    Raises:
        CorruptedObjectError: It is damaged, or is not what the record ``done`` says.
    """
    key, shard = life.key(sync, index, number), life.shard(sync, index, number)

    def use(reader: ObjectReader) -> Sums:
        return shard.check(reader, life.origin(key), life.scratch, whole=True)

    sums = life.read_file(key, use)
    if sums is not None and done is not None and sums != (done.sums[number], done.rests[number]):
        raise CorruptedObjectError(
            f"{life.origin(key)} is undamaged, but its checksums are not those in the record of its state"
        )
    return sums


def _say(life: Life, key: str, damage: object) -> None:
    """Log that an object is written again, and why: ``damage`` says what is wrong with it; None means that it is gone."""
    why = "it is gone" if damage is None else f"it is damaged: {damage}"
    life.say.error("writing %s again with the same content, because %s", key, why)
