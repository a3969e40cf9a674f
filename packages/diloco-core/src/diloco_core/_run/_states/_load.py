"""Loading what a run's store holds.

This takes the newest complete state of every fragment, or the one before it if that is damaged.

The values of a shard are taken from files: from the newest one that holds them whole, and those
since that say how they changed.

Those of the initial state may also be taken from memory: until a newer state is complete, it is the
only one of the run, and it cannot be computed again. But most replicas begin with the same values,
from the same seed or the same checkpoint. They need not read them; and what is damaged or gone in
the store, they write again, when they begin and when others ask. Later they hold other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ..._arithmetic._layout import Piece
from ..._arithmetic._sharded import adopt_shard
from ..._errors import CorruptedObjectError, DivergedError, ObjectNotFoundError
from ..._store._api import ObjectReader
from ..._store._reread import list_folders, open_ahead
from ..._wire._published import WITHOUT
from .._incarnation._incarnation import Incarnation
from .._incarnation._progress import Progress
from .._records._keys import Delta, commit_key, deltas, done_key
from .._records._records import Done
from .._records._rules import newest_done
from .._repair import mend_shard, read_commit, read_done
from ._kept import bring_back, mend_from_copies
from ._rollback import History, NothingWholeError, close_gaps

_TRIES = 8


def load(incarnation: Incarnation) -> None:
    """Load the newest published state of every fragment.

    Adopting what was committed after it is left to the caller.

    If that state is damaged, the state before it is loaded, and ``incarnation.damage`` says which
    state has to be made again while the log is replayed.

    Raises:
        CorruptedObjectError: The store does not hold what its records promise.
        ReloadError: The run has gone back to older states meanwhile.
    """
    count = len(incarnation.fragments)
    for attempt in range(_TRIES):
        incarnation.timing.sleep(0.2 * attempt)  # a listing may be out of date
        history = History(incarnation)
        if history.rollbacks and bring_back(incarnation):
            history = History(incarnation)
        close_gaps(incarnation, history)
        incarnation.standing.rollbacks = history.rollbacks
        incarnation.damage.mending.clear()
        try:
            # A list, so that the others are loaded even if one was deleted in the meantime.
            loaded = [_load_newest(incarnation, index, history) for index in range(count)]
            if all(loaded):
                break
        except CorruptedObjectError:
            # Perhaps it is not damaged, but was deleted while it was read and its space reused.
            # Then there is a newer state.
            if incarnation.newest_done() == history.newest:
                raise
    else:
        raise CorruptedObjectError(
            f"the published state in {incarnation.store.uri} was deleted each of the {_TRIES} "
            "times that it was read. A run deletes states only when newer ones are complete: look "
            "for something else that deletes objects below this prefix, or start this replica again"
        )
    oldest = min(progress.sync for progress in incarnation.fragments)
    for rollback in reversed(incarnation.standing.rollbacks):
        if rollback.sync > oldest and incarnation.standing.holds(rollback):
            incarnation.standing.turn_back(rollback)
            return
    if not oldest:
        incarnation.standing.begin()
        return
    commit = read_commit(incarnation, oldest, decided=True)
    if commit is None:
        raise CorruptedObjectError(
            f"{incarnation.origin(commit_key(oldest))} is gone, although a run never deletes "
            "commit records: something else has deleted it"
        )
    incarnation.standing.skip(commit)


def _load_newest(incarnation: Incarnation, index: int, history: History) -> bool:
    """Load the newest state of a fragment that is not damaged.

    Returns False if the states were deleted in the meantime.
    """
    first_error: CorruptedObjectError | None = None
    for sync in history.states(index):
        try:
            damage, has_copies = incarnation.damage.found(index, sync), history.rollbacks
            if damage and not (has_copies and mend_from_copies(incarnation, index, sync)):
                raise CorruptedObjectError(
                    f"the state of fragment {index} after sync {sync} in {incarnation.store.uri} "
                    f"is damaged: {damage}"
                )
            missing = _load_or_mend(incarnation, index, sync)
            if missing is None:
                return True
            if incarnation.newest_done()[index] > history.newest[index]:
                return False
            if sync:
                raise CorruptedObjectError(f"{incarnation.origin(missing)} is gone")
            if first_error is None:
                raise _initial_gone(incarnation, index, missing)
        except CorruptedObjectError as error:
            if incarnation.fixed and sync:
                # It cannot be made again: what each rank keeps of its own contribution is gone
                raise
            if first_error is None:
                first_error = error
                incarnation.damage.make_again(index, sync, str(error))
            if sync:
                reason = str(error).rstrip(".")
                incarnation.say.error("%s. Trying to make it again from the state before.", reason)
    if first_error is None:
        return False
    raise NothingWholeError(str(first_error)) from first_error


def _load_or_mend(incarnation: Incarnation, index: int, sync: int) -> str | None:
    """Load a fragment's state as :func:`_load_fragment`.

    If it is damaged and there are copies, mend it and load it again.
    """
    try:
        return _load_fragment(incarnation, index, sync)
    except CorruptedObjectError:
        if not incarnation.standing.rollbacks or not mend_from_copies(incarnation, index, sync):
            raise
    return _load_fragment(incarnation, index, sync)


def _initial_gone(incarnation: Incarnation, index: int, missing: str) -> CorruptedObjectError:
    """Return the error for an initial state that is not there.

    It is deleted when there are two newer states, so these may be lost.
    """
    recorded = max(incarnation.recorded(), default=0)
    if not recorded:
        return CorruptedObjectError(f"{incarnation.origin(missing)} is gone")
    return CorruptedObjectError(
        f"the run's log goes up to sync {recorded}, but {incarnation.store.uri} holds neither an "
        f"undamaged state of fragment {index} after any sync nor its initial state: something else "
        "has deleted objects below state/"
    )


def _load_fragment(incarnation: Incarnation, index: int, sync: int) -> str | None:
    """Load a fragment's state. Returns None, or the key of an object that is missing."""
    job = incarnation.fragments[index].job
    done = read_done(incarnation, sync, index) if sync else incarnation.manifest.done(index)
    if done is None:
        return done_key(sync, index)
    shards = job.layout.shards
    fresh = Progress.recorded(job, done)
    parts = incarnation.made_of(sync, index)
    # The files of a shard one after another, since each changes the values of the one before.
    places = [(part, number) for number in range(shards) for part in parts]
    files = {incarnation.key(part, index, number): (part, number) for part, number in places}
    listing = list_folders(incarnation.store.list, files)

    def announce(key: str, reader: ObjectReader) -> None:
        if incarnation.gather and sync:
            reader.expect(0, reader.size)
        else:
            part, number = files[key]
            incarnation.shard(part, index, number).announce_load(reader, incarnation.origin(key))

    for number in range(shards):
        incarnation.fragments[index].forget_outer(number, incarnation.chunk_bytes)
    in_memory: set[int] = set()
    if not parts[0]:
        initial = incarnation.manifest.done(index)
        in_memory = shards_in_memory(incarnation, initial)
        # When a run begins, each rank looks at some of the files, so that damage is found while it
        # can be mended; a replica that cannot read one of the others asks for it. If there are
        # syncs already, this rank looks at all: it will replay the syncs, and then no longer hold
        # these values.
        size = incarnation.manifest.world_size
        looks_at_all = bool(in_memory and incarnation.recorded())
        beginning = Progress.recorded(job, initial)
        for number in sorted(in_memory):
            look = looks_at_all or number % size == incarnation.rank
            if not take_from_memory(incarnation, beginning, number, listing, look=look):
                return incarnation.key(0, index, number)
    needed = [key for key, (part, number) in files.items() if part or number not in in_memory]
    sizes = {key: listing.get(key) for key in needed}
    with open_ahead(incarnation.store.store, sizes, announce) as readers:
        for number in range(shards):
            begun = number in in_memory
            opened = [None if begun and not part else next(readers) for part in parts]
            if incarnation.gather and sync:
                key, use = incarnation.key(sync, index, number), partial(hold, incarnation, fresh)
                content = incarnation.read_file(key, partial(use, number), opened[0])
                missing = None if content else key
            else:
                missing = read_values(incarnation, fresh, number, opened, begun=begun)
            if missing is not None:
                return missing
    incarnation.standing.fragments[index] = fresh
    return None


def read_values(
    incarnation: Incarnation,
    progress: Progress,
    number: int,
    opened: Sequence[ObjectReader | None] = (),
    *,
    begun: bool = False,
) -> str | None:
    """Read the values of a shard of the state that ``progress`` describes, and verify them.

    If any file is damaged, all are read again, from the one that holds the values whole: a change
    cannot be added twice.

    Args:
        incarnation: The incarnation that reads them.
        progress: The state; memory need not hold anything of it.
        number: Number of the shard.
        opened: The files that the values are made of (:meth:`.Incarnation.made_of`), if they are
            open already. They are used first, and closed.
        begun: Whether memory holds the values of the first of these files already.

    Returns:
        None; or the key of a file that does not exist.

    Raises:
        CorruptedObjectError: A file is damaged, or is not what the record of the state says.
    """
    parts = incarnation.made_of(progress.sync, progress.index)
    readers = list(opened) or [None] * len(parts)
    first = int(begun)

    def read() -> str | None:
        nonlocal first
        # What was opened before, and what memory held, is used by the first attempt only.
        start, first = first, 0
        for place, sync in list(enumerate(parts))[start:]:
            reader, readers[place] = readers[place], None
            if not _take(incarnation, progress, sync, number, reader):
                return incarnation.key(sync, progress.index, number)
        return None

    missing = incarnation.again(read)
    if missing is None:
        progress.values_at[number] = progress.sync
    return missing


def begin_to_hold(incarnation: Incarnation, progress: Progress, number: int) -> bool:
    """Say whether a part of a shard has to be read, because memory does not hold it.

    The shard is that after the fragment's last sync.
    """
    has_values = progress.values_at[number] == progress.sync
    if has_values and progress.outer_at[number] == progress.sync:
        return False
    progress.forget_outer(number, incarnation.chunk_bytes)
    if has_values and not progress.sync and not incarnation.manifest.first:
        progress.outer_at[number] = 0  # no outer step has been taken yet
        return False
    return True


def hold(incarnation: Incarnation, progress: Progress, number: int, reader: ObjectReader) -> bool:
    """Read what memory lacks of a shard from its file, and from others that its values are made of.

    Returns True: the file is there.

    Raises:
        CorruptedObjectError: It is not what was published.
        ObjectNotFoundError: Another file is gone.
    """
    key, stored = incarnation.file(progress, number)
    sync, origin = progress.sync, incarnation.origin(key)
    if sync or incarnation.manifest.first:
        described, chunks, scalars = stored.described(reader, origin, progress.rests[number])
        progress.job.install_outer(chunks, scalars)
        progress.without.pop(number, None)
        if WITHOUT in described:
            progress.without[number] = described[WITHOUT]
        incarnation.traffic.received += stored.rest_bytes(reader.size)
    if progress.values_at[number] != sync and incarnation.made_of(sync, progress.index) == [sync]:
        stored.load(reader, origin, incarnation.scratch, progress.expected(number))
        incarnation.traffic.received += reader.size - stored.rest_bytes(reader.size)
        progress.values_at[number] = sync
    elif progress.values_at[number] != sync:
        missing = read_values(incarnation, progress, number)
        if missing is not None:
            raise ObjectNotFoundError(f"{incarnation.origin(missing)} is gone")
    progress.outer_at[number] = sync
    return True


def _take(
    incarnation: Incarnation,
    progress: Progress,
    sync: int,
    number: int,
    opened: ObjectReader | None,
) -> bool:
    """Take the values in a file, or add its change to the values.

    Returns False if it does not exist.
    """
    key, shard = incarnation.file(progress, number, sync)
    expected = progress.expected(number) if sync == progress.sync else None

    def use(reader: ObjectReader) -> bool:
        shard.load(reader, incarnation.origin(key), incarnation.scratch, expected)
        incarnation.traffic.received += reader.size
        return True

    try:
        return incarnation.store.read(key, use, opened) or False
    except DivergedError as error:
        raise CorruptedObjectError(
            f"{incarnation.origin(key)} does not fit the states before it: with the change in it, "
            "the values are not those of the replica that published it"
        ) from error


def shards_in_memory(incarnation: Incarnation, done: Done) -> set[int]:
    """The shards of a fragment's initial state whose values memory holds."""
    return {
        number
        for number, values in enumerate(done.sums)
        if incarnation.shard(0, done.fragment, number).digest() == values
    }


def mend_initial(incarnation: Incarnation, *, gone: bool = True) -> None:
    """Check and mend the initial states whose values are still in memory.

    This is done because another replica cannot read something. With ``gone=False``, what is not
    there stays away: it may have been deleted because it was no longer needed.
    """
    listing = {} if gone else incarnation.store.list("initial/")
    for index, progress in enumerate(incarnation.fragments):
        if progress.sync or progress.commit is not None or _is_collected(incarnation, index):
            continue
        done = incarnation.manifest.done(index)
        for number in shards_in_memory(incarnation, done):
            if gone or incarnation.key(0, index, number) in listing:
                mend_shard(incarnation, Progress.recorded(progress.job, done), number, done)


def take_from_memory(
    incarnation: Incarnation,
    fresh: Progress,
    number: int,
    listing: Mapping[str, int],
    *,
    look: bool,
) -> bool:
    """Take a shard of the initial state from memory, and mend its file in the store if necessary.

    Args:
        incarnation: The incarnation.
        fresh: The fragment's initial state as it is recorded.
        number: Number of the shard, one of :func:`shards_in_memory`.
        listing: The files of the fragment's initial state in the store.
        look: Whether the shard's file is read and checked, if it is there.

    Returns:
        False if the file was deleted because there are (or were) newer states.
    """
    key, job = incarnation.key(0, fresh.index, number), fresh.job
    if key not in listing and _is_collected(incarnation, fresh.index):
        return False

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(job.published(piece))

    adopt_shard(job, number, read, incarnation.chunk_bytes, incarnation.scratch)
    if look or key not in listing:
        mend_shard(incarnation, fresh, number, incarnation.manifest.done(fresh.index))
    return True


def _is_collected(incarnation: Incarnation, index: int) -> bool:
    """Say whether the initial state of a fragment was deleted by rule.

    It is when nothing can be computed from it any more.
    """
    states, every = incarnation.store.list("state/"), incarnation.whole_every
    if newest_done(states, len(incarnation.fragments), every)[index]:
        return True
    if every > 1:
        # Contributions go when any newer state is complete, and this one goes when a whole one is.
        return False
    first = index + 1
    if incarnation.store.peek(commit_key(first)) is None:
        return False
    return not any(map(Delta.parse, incarnation.store.list(deltas(first))))
