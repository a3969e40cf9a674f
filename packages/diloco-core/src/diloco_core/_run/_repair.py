"""Writing damaged objects of a run again, with the same content.

The content must be the same, because going back behind a commit would mean deciding its sync twice.
A record is made from another record that holds the same fields, or from the memory of an
incarnation that has read it. A shard is computed again from the previous state and the
contributions, and compared with what its record says about it.

A record of another run does not count as damage: reading it is an error that nothing here catches,
and it is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from .._errors import CorruptedObjectError
from .._store._api import ObjectReader
from .._wire._published import Sums, shard_metadata
from ._incarnation._incarnation import Incarnation
from ._incarnation._progress import Progress, publishes_whole
from ._records._keys import Hint, commit_key, done_key
from ._records._records import Commit, Done, Rollback
from ._round._reload import ReloadError, Why

_ASKING = 4  # how often a record is read again while other replicas are asked to repair it


def read_done(incarnation: Incarnation, sync: int, index: int) -> Done | None:
    """The record of a complete state.

    If it is damaged, it is made again from the commit record and the verified shards.

    Returns:
        The record; None if there is none.

    Raises:
        CorruptedObjectError: It is damaged, and cannot be made again.
        ReloadError: The run has gone back to older states.
    """
    key = done_key(sync, index)
    try:
        return incarnation.done(sync, index)
    except CorruptedObjectError as error:
        done = _done_again(incarnation, sync, index)
        if done is None:
            raise
        _say(incarnation, key, error)
        incarnation.store.put(key, lambda: [done.to_json()])
        return done


def readable_done(incarnation: Incarnation, sync: int, index: int) -> Done | None:
    """The record of a complete state; None if it does not exist or cannot be read."""
    try:
        return incarnation.done(sync, index)
    except CorruptedObjectError:
        return None


def readable_log(incarnation: Incarnation, sync: int) -> Commit | Rollback | None:
    """A record of the log; None if it does not exist or cannot be read."""
    try:
        return incarnation.log(sync)
    except CorruptedObjectError as error:
        incarnation.say.error("%s", error)
        return None


def read_commit(incarnation: Incarnation, sync: int, *, decided: bool = False) -> Commit | None:
    """The record of a sync. A damaged record is written again if that is possible.

    Args:
        incarnation: The incarnation that reads it.
        sync: The sync.
        decided: Whether the record is known to have existed, so that it is lost if it is not there.

    Returns:
        The record; None if there is none.

    Raises:
        CorruptedObjectError: It is damaged, and neither this incarnation nor the store knows what
            it said.
        ReloadError: There is a rollback in its place: the run has gone back to older states.
    """
    try:
        record = incarnation.log(sync)
    except CorruptedObjectError as error:
        mended = commit_again(incarnation, sync, error)
        if mended is None:
            raise
        return mended
    if record is None and decided and commit_again(incarnation, sync, None) is not None:
        record = incarnation.log(sync)
    if isinstance(record, Rollback):
        raise ReloadError(Why.WENT_BACK, record)
    return record


def commit_again(
    incarnation: Incarnation, sync: int, damage: CorruptedObjectError | None
) -> Commit | None:
    """Write the damaged record of a sync again, and return it.

    Returns None if neither this incarnation nor the store knows what it said.

    If ``damage`` is None, the record is lost. If there is another record in its place by now, that
    one stays: while the record was missing, a rollback may have been decided.
    """
    index = incarnation.index(sync)
    adopted, decided = incarnation.fragments[index].commit, incarnation.damage.decided
    commit = decided if decided is not None and decided.sync == sync else adopted
    if commit is None or commit.sync != sync:
        done = readable_done(incarnation, sync, index)
        commit = done.commit if done is not None else None
    if commit is None:
        return None
    data = commit.to_json()
    _say(incarnation, commit_key(sync), damage)
    if damage is None:
        incarnation.store.create(commit_key(sync), lambda: data)
    else:
        incarnation.store.put(commit_key(sync), lambda: [data])
    return commit


def rewrite_shard(
    incarnation: Incarnation,
    progress: Progress,
    sync: int,
    number: int,
    damage: object,
    done: Done | None = None,
) -> Sums:
    """Write a shard of a state again from memory, which must hold its values and its outer state.

    Returns its checksums.

    ``damage`` says what is wrong with the shard in the store; None means that it is gone. ``done``
    is the record of the state, if the caller knows it already.

    Raises:
        CorruptedObjectError: Memory holds other values than those that were published.
    """
    key, shard = incarnation.file(progress, number, sync)
    without = progress.without.get(number, "") if sync == progress.sync else ""
    metadata = shard_metadata(progress.job, sync, without)
    sums = shard.sums(metadata)
    done = done or readable_done(incarnation, sync, progress.index)
    if done is not None and sums != (done.sums[number], done.rests[number]):
        raise computed_otherwise(incarnation, key)
    _say(incarnation, key, damage)
    incarnation.store.put(key, lambda: shard.parts(metadata))
    return sums


def computed_otherwise(incarnation: Incarnation, key: str) -> CorruptedObjectError:
    """Return the error for a damaged shard that this incarnation cannot replace.

    It computes other values than those that were published.
    """
    return CorruptedObjectError(
        f"{incarnation.origin(key)} or another object of its state is damaged, and rank "
        f"{incarnation.rank} cannot replace it, because the values that it computes are not the "
        "same: different kinds of processors round differently. Resume the run on a machine with "
        "the same kind of processor as before, or with resume='newest-whole'."
    )


def mend_published(incarnation: Incarnation, index: int) -> None:
    """Check the published shards of the state in memory; write damaged or lost ones again.

    Only shards of which memory holds both the values and the outer state are checked, and of
    encoded state only those that this incarnation has computed itself.
    """
    progress = incarnation.fragments[index]
    done = readable_done(incarnation, progress.sync, index)
    for number in range(progress.job.layout.shards):
        in_memory = progress.values_at[number] == progress.outer_at[number] == progress.sync
        if in_memory and incarnation.shard(progress.sync, index, number).writable:
            mend_shard(incarnation, progress, number, done)


def mend_shard(
    incarnation: Incarnation, progress: Progress, number: int, done: Done | None
) -> None:
    """Check the file of a shard that memory holds; write it again if it is damaged or gone.

    Memory holds both its values and its outer state.

    Raises:
        CorruptedObjectError: Memory holds other values than those that were published.
    """
    damage: CorruptedObjectError | None = None
    try:
        if check_shard(incarnation, progress.sync, progress.index, number, done) is not None:
            return
    except CorruptedObjectError as error:
        damage = error
    rewrite_shard(incarnation, progress, progress.sync, number, damage, done)


def commit_mended(incarnation: Incarnation, sync: int) -> Commit | None:
    """The record of a sync, as :func:`read_commit`.

    If it is damaged, this asks the other replicas, and waits for a grace.

    A replica that has created or read the record can write it again; and every replica can, once
    the state after the sync is complete.

    Raises:
        CorruptedObjectError: It is damaged, and no replica has written it again.
    """
    try:
        return read_commit(incarnation, sync)
    except CorruptedObjectError as error:
        last_error = error
    for _ in asking(incarnation, last_error, _ASKING):
        try:
            return read_commit(incarnation, sync)
        except CorruptedObjectError as error:
            last_error = error
    raise last_error


def asking(incarnation: Incarnation, damage: CorruptedObjectError, times: int) -> Iterator[None]:
    """Ask the other replicas to write again what cannot be read, and wait for a grace.

    Yields when to try again.
    """
    grace = incarnation.settings.grace
    incarnation.say.error(
        "%s. Asking the other replicas to write it again, and waiting for them for %g s.",
        str(damage).rstrip("."),
        grace,
    )
    ask_for_repair(incarnation)
    for _ in range(times):
        incarnation.timing.sleep(grace / times)
        yield


def ask_for_repair(incarnation: Incarnation) -> None:
    """Ask running replicas to repair what this incarnation cannot read.

    They see the request where they look for contributions.
    """
    newest = max(incarnation.recorded(), default=0)
    for sync in sorted({newest, newest + 1} - {0}):
        hint = Hint(sync, incarnation.rank, incarnation.epoch, "repair")
        incarnation.store.put(hint.key, lambda: [b"\n"])


def answer(incarnation: Incarnation) -> None:
    """Answer a request for repair.

    This compares the store with what this incarnation knows for certain, and writes damaged objects
    again, as they were.

    Raises:
        ReloadError: The run has gone back to older states.
    """
    for rollback in incarnation.standing.rollbacks[-1:]:
        key = commit_key(rollback.sync)
        try:
            incarnation.log(rollback.sync)
        except CorruptedObjectError as error:
            _say(incarnation, key, error)
            incarnation.store.put(key, lambda: [rollback.to_json()])  # noqa: B023 - called at once
    for index, progress in enumerate(incarnation.fragments):
        commit = progress.commit
        if commit is None:
            continue
        read_commit(incarnation, commit.sync, decided=True)
        if incarnation.published(progress.sync):
            mend_published(incarnation, index)
            _mend_done(incarnation, index)


def _mend_done(incarnation: Incarnation, index: int) -> None:
    sync = incarnation.fragments[index].sync
    if incarnation.store.peek(done_key(sync, index)) is None:
        return
    try:
        read_done(incarnation, sync, index)
    except CorruptedObjectError as error:
        incarnation.say.error("%s", error)


def _done_again(incarnation: Incarnation, sync: int, index: int) -> Done | None:
    """Make the record of a complete state from the commit record and the shards.

    None if one of these is gone or damaged.
    """
    commit = read_commit(incarnation, sync, decided=True)
    if commit is None:
        return None
    sums: list[Sums] = []
    job = incarnation.fragments[index].job
    for number in range(job.layout.shards):
        try:
            stored = check_shard(incarnation, sync, index, number)
        except CorruptedObjectError:
            return None
        if stored is None:
            return None
        sums.append(stored)
    values, rests = zip(*sums, strict=True)
    full = publishes_whole(job, sync)
    return Done(sync, index, values, rests, commit, full)


def check_shard(
    incarnation: Incarnation, sync: int, index: int, number: int, done: Done | None = None
) -> Sums | None:
    """Read the whole file of a published shard and verify it.

    Returns its checksums; None if it does not exist.

    Raises:
        CorruptedObjectError: It is damaged, or is not what the record ``done`` says.
    """
    key, shard = incarnation.key(sync, index, number), incarnation.shard(sync, index, number)

    def use(reader: ObjectReader) -> Sums:
        return shard.check(reader, incarnation.origin(key), incarnation.scratch)

    sums = incarnation.read_file(key, use)
    if sums is not None and done is not None and sums != (done.sums[number], done.rests[number]):
        raise CorruptedObjectError(
            f"{incarnation.origin(key)} is undamaged, but its checksums are not those in the "
            "record of its state"
        )
    return sums


def _say(incarnation: Incarnation, key: str, damage: object) -> None:
    """Log that an object is written again, and why.

    ``damage`` says what is wrong with it; None means that it is gone.
    """
    why = "it is gone" if damage is None else f"it is damaged: {damage}"
    incarnation.say.error("writing %s again with the same content, because %s", key, why)
