"""Publishing states, and deleting what is no longer needed.

This says when a state counts as complete, and what may be deleted then. Where requests to the store
take long, shards are published while the next ones are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from ..._errors import CorruptedObjectError, ObjectNotFoundError
from ..._store._reread import in_parallel
from ..._store._transfer import CONNECTIONS
from ..._wire._published import Sums, end_sums, shard_metadata
from .._incarnation._incarnation import Incarnation
from .._incarnation._progress import Progress
from .._records._keys import done_key
from .._records._records import Commit, Done
from .._records._rules import collectable, kept_from, newest_done, states_kept_from, writer
from .._repair import check_shard, readable_done, rewrite_shard
from ._kept import forget_kept, keys_of_shards

LOOK_AGAIN = 64
"""The number of syncs between two searches for objects usually deleted early in a run.

Each search costs a listing or two.
"""


def write_done(incarnation: Incarnation, commit: Commit) -> None:
    """Sharded: write the record that all shards of a sync are published.

    They are adopted already.
    """
    _create_done(incarnation, incarnation.fragments[commit.fragment].done(commit))


def publish_previous(incarnation: Incarnation, commit: Commit, member: int | None) -> None:
    """Gather: publish the state that a sync starts from if its publication is due.

    Memory still holds that state.

    By now all members have agreed on the state, since the record of the sync names its digest.
    Member k publishes the shards k, k + members, …. The fragment's next sync checks whether all
    shards arrived; if not, the next publication makes up for it.
    """
    progress = incarnation.fragments[commit.fragment]
    unfinished, progress.unfinished = progress.unfinished, None
    members = len(commit.members)
    designated = member == commit.sync % members
    if unfinished is not None and designated and _is_published(incarnation, unfinished):
        _create_done(incarnation, unfinished)
    if progress.commit is None or not incarnation.published(progress.sync):
        return
    shards = range(progress.job.layout.shards)
    written = {} if member is None else _publish(incarnation, progress, shards[member::members])
    progress.unfinished = _own_done(incarnation, progress, written)


def finish(incarnation: Incarnation, *, asked: bool = False) -> None:
    """Make sure that the run can start again from the state that this incarnation holds.

    This is the last thing that an incarnation does. In the gather topology it also does so when
    another replica asks for a state that it cannot compute (``asked``), even if no publication is
    due.
    """
    listing = incarnation.store.list("state/")
    for index, newest in enumerate(newest_done(listing, len(incarnation.fragments))):
        progress = incarnation.fragments[index]
        if newest > progress.sync or None in progress.values_at or not progress.commit:
            continue
        if newest == progress.sync and (asked or not incarnation.gather):
            continue
        done = _own_done(incarnation, progress)
        if newest == progress.sync:
            _compare_done(incarnation, done)
            continue
        keys = keys_of_shards(incarnation, index, progress.sync)
        missing = [shard for shard, key in enumerate(keys) if key not in listing]
        if incarnation.gather:
            if not _publish_whole(incarnation, progress, done, missing):
                continue
        elif missing:
            continue
        if asked:
            incarnation.say.error(
                "published the state after sync %d before its time, because another replica has "
                "asked for it",
                progress.sync,
            )
        _create_done(incarnation, done)


def collect(incarnation: Incarnation, writers: Collection[int | None] = ()) -> None:
    """Delete what no incarnation can need any more.

    Args:
        incarnation: The incarnation.
        writers: In fixed runs: the ranks of whose contributions and shards this deletes; None
            stands for everything else. If left out, all of it is deleted.
    """
    states = incarnation.store.list("state/")
    keys = [*incarnation.store.list("deltas/"), *states]
    count, every = len(incarnation.fragments), incarnation.whole_every
    last, rollback = incarnation.sync, incarnation.rollback
    kept = whole = kept_from(states, count, last=last, rollback=rollback)
    if incarnation.gather and count > 1:
        # Fragments publish in turn, so two states of the whole model need three of those that were
        # published first.
        whole = kept_from(states, count, last=last, rollback=rollback, count=3)
    states_kept = states_kept_from(states, count, whole, every=every, rollback=rollback)
    manifest = incarnation.manifest
    recent = manifest.retention + count * max(manifest.publish_every, every) * 3
    # After that only now and then, for objects that had to stay so long or were left by an
    # incarnation that died.
    if last - rollback <= recent or last % LOOK_AGAIN == 0:
        keys += incarnation.store.list("initial/")
        if rollback:
            forget_kept(incarnation, states_kept)
    if writers:
        keys = [key for key in keys if writer(key, manifest.world_size) in writers]
    unneeded = collectable(
        keys,
        last=last,
        kept=kept,
        states_kept=states_kept,
        retention=manifest.retention,
        keep_deltas=incarnation.gather,
        initial=manifest.initial,
    )
    if unneeded:
        # A reader that lags far behind may see other bytes in these objects. Checksums show that,
        # and it loads a newer state.
        incarnation.store.delete(unneeded, unread=True)


def _publish_whole(
    incarnation: Incarnation, progress: Progress, done: Done, missing: Sequence[int]
) -> bool:
    """Gather: publish the shards that are missing, and mend those that are damaged.

    Returns whether all are published then.
    """
    shards = range(progress.job.layout.shards)
    # Incarnations that do this at the same time begin at different shards.
    start = incarnation.rank % len(shards)
    in_turn = sorted(missing, key=lambda shard: (shard - start) % len(shards))
    _publish(incarnation, progress, in_turn)
    # A list, so that all shards are checked and mended before they are compared.
    stored = [_whole_sums(incarnation, progress, shard) for shard in shards]
    return all(_is_own(incarnation, done, shard, sums) for shard, sums in enumerate(stored))


def _publish(
    incarnation: Incarnation, progress: Progress, shards: Iterable[int]
) -> dict[int, Sums]:
    """Publish shards of the state in memory.

    Returns the checksums of those that this call wrote.
    """
    sync, index = progress.sync, incarnation.index(progress.sync)
    metadata = shard_metadata(progress.job, sync)

    def upload(number: int) -> tuple[int, Sums | None]:
        attempts: list[Sums] = []
        parts = partial(incarnation.shard(sync, index, number).parts, metadata, attempts.append)
        created = incarnation.create(incarnation.key(sync, index, number), parts)
        return number, attempts[-1] if created else None

    uploads = (partial(upload, number) for number in shards)
    written = in_parallel(incarnation.store.store, uploads)
    return {number: sums for number, sums in written if sums is not None}


def _own_done(
    incarnation: Incarnation, progress: Progress, written: Mapping[int, Sums] | None = None
) -> Done:
    """The record of the state in memory, which is that after a sync.

    ``written`` has the checksums of files that this incarnation has just written.

    Gather: outer state takes no part in the digest on which the members agree. So its checksums are
    computed here from memory, and compared with what others have published. That costs one pass
    over the outer state per publication.
    """
    commit = progress.commit
    assert commit is not None
    if not incarnation.gather:
        return progress.done(commit)
    metadata, known = shard_metadata(progress.job, commit.sync), written or {}
    rests = []
    for number in range(progress.job.layout.shards):
        shard = incarnation.shard(commit.sync, commit.fragment, number)
        rests.append(known[number].rest if number in known else shard.rest(metadata))
    return progress.done(commit, rests)


def _compare_done(incarnation: Incarnation, own_done: Done) -> None:
    """Log an error if another incarnation has recorded another state than this one computed."""
    done = readable_done(incarnation, own_done.sync, own_done.fragment)
    if done is not None and done != own_done:
        incarnation.say.error(
            "the published state that %s describes is not what this replica has computed: the "
            "values or the outer optimizer's tensors differ. Check the memory of the machines "
            "before this run is continued.",
            incarnation.origin(done_key(own_done.sync, own_done.fragment)),
        )


def _is_published(incarnation: Incarnation, done: Done) -> bool:
    """Say whether the files of all shards are there and are what this incarnation has computed.

    The checksums at their ends show that.
    """
    listing = incarnation.store.list(f"state/{done.sync:08}/")
    keys = keys_of_shards(incarnation, done.fragment, done.sync)
    if not all(key in listing for key in keys):
        return False
    ends = (partial(_stored_end, incarnation, key, listing[key]) for key in keys)
    stored = in_parallel(incarnation.store.store, ends, CONNECTIONS)
    return all(_is_own(incarnation, done, shard, sums) for shard, sums in enumerate(stored))


def _is_own(incarnation: Incarnation, done: Done, shard: int, stored: Sums | None) -> bool:
    """Say whether a published shard is what this incarnation has computed; log it if not."""
    if stored is None or stored == (done.sums[shard], done.rests[shard]):
        return stored is not None
    differing_part = "values" if stored.values != done.sums[shard] else "outer optimizer's tensors"
    incarnation.say.error(
        "the %s in %s differ from what this replica has computed. No replica will begin from this "
        "state; a later one takes its place. If this happens again, check the memory of the "
        "machines.",
        differing_part,
        incarnation.origin(incarnation.key(done.sync, done.fragment, shard)),
    )
    return False


def _stored_end(incarnation: Incarnation, key: str, size: int) -> Sums | None:
    """Read the checksums at the end of a published shard.

    None if they cannot be used: a later publication makes up for it.
    """
    origin = incarnation.origin(key)

    def read() -> Sums | None:
        try:
            # With the size given, this is one small request.
            opened = incarnation.store.store.open(key, size)
        except ObjectNotFoundError:
            return None
        return incarnation.store.read(key, lambda reader: end_sums(reader, origin), opened)

    try:
        return incarnation.again(read)
    except CorruptedObjectError as error:
        incarnation.say.error(
            "%s. No replica will begin from this state; a later one takes its place.",
            str(error).rstrip("."),
        )
        return None


def _whole_sums(incarnation: Incarnation, progress: Progress, number: int) -> Sums | None:
    """The checksums of a published shard, after verifying all of it.

    If it is damaged, it is written again from memory.

    None if it was deleted because there is a newer state.
    """
    try:
        return check_shard(incarnation, progress.sync, progress.index, number)
    except CorruptedObjectError as error:
        if incarnation.newest_done()[progress.index] > progress.sync:
            return None  # it was deleted while it was read, and its space was reused
        return rewrite_shard(incarnation, progress, progress.sync, number, error)


def _create_done(incarnation: Incarnation, done: Done) -> None:
    if not incarnation.store.create(done_key(done.sync, done.fragment), done.to_json):
        # Another incarnation was faster. Reading its record raises an error if that incarnation
        # belongs to another run.
        readable_done(incarnation, done.sync, done.fragment)
