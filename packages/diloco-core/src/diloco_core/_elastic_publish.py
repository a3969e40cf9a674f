"""Publishing and collecting: when a state counts as complete, and what may go then."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ._elastic_records import Done, done_key
from ._elastic_rules import collectable, kept_from, newest_done
from ._errors import CorruptedObjectError, ObjectNotFoundError
from ._published import shard_metadata
from ._reread import read_again

if TYPE_CHECKING:
    from ._elastic_life import Life, Progress
    from ._elastic_records import Commit
    from ._published import Shard, Sums
    from ._store import ObjectReader


def write_done(life: Life, commit: Commit) -> None:
    """All shards of a sync are published and adopted: say so."""
    progress = life.fragments[commit.fragment]
    rests = tuple(rest for rest in progress.rests if rest is not None)
    _create_done(life, Done(commit.sync, commit.fragment, tuple(progress.sums), rests, commit))


def publish_previous(life: Life, commit: Commit, member: int | None) -> None:
    """Gather: publish the state that a sync starts from, if it is due; memory still holds it.

    By now all members have agreed on it: the record names its digest. Member k publishes the shards k, k + members, ….
    Whether all arrived is seen when the next sync of the fragment comes; if not, the next publication makes up for it.
    """
    progress = life.fragments[commit.fragment]
    before, progress.unfinished = progress.unfinished, None
    members = len(commit.members)
    if before is not None and member == commit.sync % members:
        rests = _published_rests(life, before)
        if rests is not None:
            _create_done(life, replace(before, rests=rests))
    if progress.commit is None or not life.published(progress.sync):
        return
    progress.unfinished = Done(progress.sync, commit.fragment, tuple(progress.sums), (), progress.commit)
    if member is not None:
        _publish(life, progress, range(member, progress.job.layout.shards, members))


def finish(life: Life) -> None:
    """The last thing a life does: see to it that the state it stands at is a place to start from."""
    listing = life.store.list("state/")
    for index, newest in enumerate(newest_done(listing, len(life.fragments))):
        progress = life.fragments[index]
        if newest >= progress.sync or None in progress.values_at:
            continue
        rests = tuple(rest for rest in progress.rests if rest is not None)
        done = Done(progress.sync, index, tuple(progress.sums), rests, progress.commit)
        shards = range(progress.job.layout.shards)
        missing = [shard for shard in shards if life.key(progress.sync, index, shard) not in listing]
        if life.gather:
            # Lives that leave at the same time begin at different shards.
            start = life.rank % len(shards)
            _publish(life, progress, sorted(missing, key=lambda shard: (shard - start) % len(shards)))
            found = [_stored_sums(life, progress, index, shard) for shard in shards]
            if any(sums is None or sums.values != done.sums[shard] for shard, sums in enumerate(found)):
                continue
            done = replace(done, rests=tuple(sums.rest for sums in found if sums is not None))
        elif missing:
            continue
        _create_done(life, done)


def collect(life: Life) -> None:
    """Remove what no life can need any more."""
    states = life.store.list("state/")
    keys = [*life.store.list("deltas/"), *states]
    if life.sync - life.rollback <= life.manifest.retention + len(life.fragments) * life.manifest.publish_every * 3:
        keys += life.store.list("initial/")
    gone = collectable(
        keys,
        last=life.sync,
        kept=kept_from(states, len(life.fragments), last=life.sync, rollback=life.rollback),
        retention=life.manifest.retention,
        keep_deltas=life.gather,
        initial=life.manifest.initial,
    )
    if gone:
        # A reader that lags far behind may see other bytes in them; its checksums tell, and it loads newer state.
        life.store.delete(gone, unread=True)


def _publish(life: Life, progress: Progress, shards: range | list[int]) -> None:
    job, index = progress.job, life.index(progress.sync)
    metadata = shard_metadata(job, progress.sync)
    for number in shards:
        shard = life.shard(progress.sync, index, number)
        key = life.key(progress.sync, index, number)
        life.create(key, partial(shard.parts, metadata))


def _published_rests(life: Life, done: Done) -> tuple[int, ...] | None:
    """What the files of a state say of themselves at their ends; None where one is missing, or is not of this state."""
    sync, index = done.sync, done.fragment
    listing = life.store.list(f"state/{sync:08}/")
    keys = [life.key(sync, index, shard) for shard in range(len(done.sums))]
    if not all(key in listing for key in keys):
        return None
    rests = []
    for shard, key in enumerate(keys):
        sums = _stored_end(life, life.shard(sync, index, shard), key, listing[key])
        if sums is None or sums.values != done.sums[shard]:
            return None
        rests.append(sums.rest)
    return tuple(rests)


def _stored_end(life: Life, shard: Shard, key: str, size: int) -> Sums | None:
    def read() -> Sums | None:
        try:
            opened = life.store.store.open(key, size)  # so that it is one small request
        except ObjectNotFoundError:
            return None
        return life.store.read(key, lambda reader: shard.end(reader, life.origin(key)), opened)

    return read_again(life.timing, read)


def _stored_sums(life: Life, progress: Progress, index: int, number: int) -> Sums | None:
    key = life.key(progress.sync, index, number)
    shard = life.shard(progress.sync, index, number)

    def use(reader: ObjectReader) -> Sums:
        return shard.check(reader, life.origin(key), life.scratch)

    def read() -> Sums | None:
        try:
            return life.store.read(key, use)
        except CorruptedObjectError:
            if newest_done(life.store.list("state/"), len(life.fragments))[index] > progress.sync:
                return None  # it was removed while it was read, and its space written over
            raise

    return read_again(life.timing, read)


def _create_done(life: Life, done: Done) -> None:
    life.store.create(done_key(done.sync, done.fragment), done.to_json)
