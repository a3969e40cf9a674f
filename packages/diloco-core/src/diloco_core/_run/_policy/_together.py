"""The initial state of a run, uploaded by the replica that begins it.

If it was loaded, all ranks upload it together.

An outer loop that was loaded has outer state, of which each rank holds only its own shards. So each
rank uploads these, under a name that follows from what was loaded, and rank 0 writes the manifest
when all of them are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..._errors import CorruptedObjectError
from ..._exchange._base import Schema
from ..._exchange._endings import named_ranks
from ..._exchange._resumable import ResumableJob
from ..._store._api import InBackground
from ..._store._patient import Patient
from ..._store._reread import in_parallel, read_again
from ..._wire._published import Sums, end_sums, shard_metadata
from ..._wire._sections import fingerprint
from .._incarnation._progress import published_shard
from .._records._keys import shard_key
from .._settings import Joiner
from ._meeting import await_ranks

_DIGITS = 16


def name_of(schema: Schema, run_id: str) -> str:
    """The name of a state that was loaded, the same on all ranks."""
    return fingerprint("loaded", run_id, dict(schema.settings), dict(schema.tensors))[:_DIGITS]


def upload(
    store: Patient,
    jobs: Sequence[ResumableJob],
    nonce: str,
    numbers: Sequence[tuple[int, int]],
    chunk_bytes: int,
) -> dict[tuple[int, int], Sums]:
    """Upload shards of the initial state, each given by its fragment and its number.

    Returns their checksums.
    """

    def publish(index: int, number: int) -> Sums:
        job = jobs[index]
        shard = published_shard(job, 0, number, nonce, chunk_bytes)
        written: list[Sums] = []
        parts = partial(shard.parts, shard_metadata(job, 0), written.append)
        key = shard_key(0, index, number, nonce)
        store.put(key, parts if store.near else lambda: list(parts()))
        return written[-1]

    at_once = store.store.creates_at_once if isinstance(store.store, InBackground) else 1
    uploads = (partial(publish, *number) for number in numbers)
    return dict(zip(numbers, in_parallel(store.store, uploads, at_once), strict=True))


def upload_own(
    store: Patient, jobs: Sequence[ResumableJob], nonce: str, joiner: Joiner
) -> dict[tuple[int, int], Sums]:
    """Upload the shards of a loaded state that this rank updates."""
    own = [
        (index, number)
        for index, job in enumerate(jobs)
        for number in range(joiner.rank, job.layout.shards, joiner.world_size)
    ]
    for index, number in own:
        for piece in jobs[index].layout.chunks(number, joiner.chunk_bytes):
            jobs[index].prepare_outer(piece)
    return upload(store, jobs, nonce, own, joiner.chunk_bytes)


def sums_of_all(
    store: Patient, jobs: Sequence[ResumableJob], nonce: str, joiner: Joiner
) -> dict[tuple[int, int], Sums]:
    """Upload this rank's shards of a loaded state, and wait for those of the others.

    Returns the checksums of all.

    Raises:
        RendezvousTimeoutError: Some ranks did not upload theirs in time.
        CorruptedObjectError: A shard is damaged.
    """
    found = upload_own(store, jobs, nonce, joiner)
    keys = {
        (index, number): shard_key(0, index, number, nonce)
        for index, job in enumerate(jobs)
        for number in range(job.layout.shards)
        if (index, number) not in found
    }

    def missing() -> list[int]:
        listing = store.list(f"initial/{nonce}/")
        gone = {
            number % joiner.world_size for (_, number), key in keys.items() if key not in listing
        }
        return sorted(gone)

    await_ranks(
        store,
        missing,
        lambda ranks: (
            f"{named_ranks(ranks)} did not upload their part of the loaded state to {store.uri} "
            f"within {store.timing.join_timeout:g} s. Look at their logs. All ranks have to load "
            "the state that was saved at the same moment, each its own."
        ),
    )
    for (index, number), key in keys.items():
        found[index, number] = read_again(store.timing, partial(_end, store, key))
    return found


def _end(store: Patient, key: str) -> Sums:
    sums = store.read(key, lambda reader: end_sums(reader, f"{store.uri}/{key}"))
    if sums is None:
        raise CorruptedObjectError(f"{store.uri}/{key} is gone")
    return sums
