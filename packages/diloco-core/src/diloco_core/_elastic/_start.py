"""How a life begins: the manifest, the claim of an epoch, and the newest state in the store."""

from __future__ import annotations

import logging
import re
import secrets
from functools import partial
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, RendezvousError, RunExistsError
from .._store._api import InBackground
from .._store._parallel import in_parallel
from .._store._reread import read_again
from .._wire._published import shard_metadata
from ._beginning import beginning, wait_for_manifest
from ._compare import check_same_run
from ._life._progress import layout_bytes, published_shard
from ._log._keys import MANIFEST, commit_sync, epochs, is_claim, shard_key
from ._log._records import Manifest
from ._log._rules import states
from ._settings import choose_topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._exchange._base import Schema
    from .._exchange._resumable import ResumableJob
    from .._store._patient import Patient
    from .._timing import Timing
    from .._wire._published import Sums
    from ._life._life import Life
    from ._settings import Elastic

_STRICT_CLAIM = re.compile(r"claims/[0-9]{5}\.json")

_log = logging.getLogger("diloco_core")


def open_run(
    store: Patient,
    jobs: Sequence[ResumableJob],
    schema: Schema,
    *,
    rank: int,
    world_size: int,
    run_id: str,
    settings: Elastic,
    timing: Timing,
    chunk_bytes: int,
) -> Manifest:
    """The run's manifest, made by this replica if nobody else does.

    Rank 0 brings the initial state at once; the others wait until nobody has been at that for one grace, and bring theirs then.
    Whoever creates the manifest decides, and all take the state that it names.

    Raises:
        RendezvousError: There is no run to resume.
        RunExistsError: The prefix belongs to another run.
        MismatchError: This replica has another model or other settings.
    """
    manifest = read_manifest(store, timing)
    if manifest is None and settings.resume:
        _check_unused(store)
        raise RendezvousError(
            f"{store.uri} holds no run that could be resumed: there is no {MANIFEST}. Check the URI, or leave resume out."
        )
    if manifest is None and rank != 0:
        manifest = wait_for_manifest(
            partial(read_manifest, store, timing),
            store,
            timing,
            rank=rank,
            world_size=world_size,
            grace=settings.grace,
        )
    if manifest is None:
        _check_unused(store)
        with beginning(store, timing, rank=rank, run_id=run_id, grace=settings.grace):
            own = _initial(store, jobs, schema, rank, world_size, run_id, settings, chunk_bytes)
            store.create(MANIFEST, own.to_json)
        manifest = read_manifest(store, timing)
        if manifest is None:
            raise CorruptedObjectError(f"{store.uri}/{MANIFEST} was created and is not there")
        if manifest.initial != own.initial:
            store.delete(store.list(f"initial/{own.initial}/"))
            if own.unsynced:
                store.delete(store.list(f"{own.unsynced['folder']}/"))
    check_same_run(
        manifest,
        schema,
        rank=rank,
        world_size=world_size,
        run_id=run_id,
        settings=settings,
        uri=store.uri,
    )
    # Later lives of rank 0 do not expect that their initial values are used.
    if rank == 0 and manifest.writer != 0 and not any(epochs(store.list("claims/00000/"), 0)):
        _log.warning(
            "rank 0: the run at %s was begun by rank %d with its initial values, since nothing was heard of rank 0 for a grace. "
            "Those of this replica are not used.",
            store.uri,
            manifest.writer,
        )
    return manifest


def read_manifest(store: Patient, timing: Timing) -> Manifest | None:
    """The manifest, if there is one.

    Raises:
        CorruptedObjectError: It is damaged in the store.
        FormatError: Another version has written it.
        RunExistsError: It is that of a strict run.
    """

    def read() -> Manifest | None:
        data = store.get(MANIFEST)
        return None if data is None else Manifest.from_json(data, f"{store.uri}/{MANIFEST}")

    try:
        return read_again(timing, read)
    except CorruptedObjectError as error:
        raise CorruptedObjectError(
            f"{str(error).rstrip('.')}. Nothing of the run can be read without this object, so resume='newest-whole' does not "
            "help. If a replica of the run is still running, it writes it again: start this one later. Otherwise put a copy of "
            "the object back, exactly as it was; or begin a new run on another prefix."
        ) from error


def watch_manifest(life: Life) -> None:
    """See to it that the run's manifest is still there: without it nobody can join or resume the run.

    Raises:
        RunExistsError: Another run's manifest has taken its place.
        FormatError: The same, and another version has written it.
    """
    # At once, since what is written here is no reason to look once more.
    before, life.seen.at = life.seen.at, life.timing.clock()
    try:
        _watch(life)
    except BaseException:
        life.seen.at = before
        raise


def _watch(life: Life) -> None:
    own, store = life.manifest.to_json(), life.store

    def read() -> Manifest | None:
        data = store.get(MANIFEST)
        # What it says is of no interest as long as its bytes are those that this life has read.
        return (
            life.manifest
            if data == own
            else None
            if data is None
            else Manifest.from_json(data, life.origin(MANIFEST))
        )

    text = "rank %d: %s. Writing it again with the same content. Something else deletes or changes objects of this run."
    try:
        stored = life.again(read)
    except CorruptedObjectError as error:
        _log.error(text, life.rank, str(error).rstrip("."))
        store.put(MANIFEST, lambda: [own])
        return
    if stored is None:
        _log.error(text, life.rank, f"{life.origin(MANIFEST)} is gone")
        if store.create(MANIFEST, lambda: own):
            return
        stored = life.again(read)
    if stored is not None and stored != life.manifest:
        raise RunExistsError(
            f"the manifest of another run (begun by run {stored.run_id!r}, rank {stored.writer}) has taken the place of this "
            f"run's at {store.uri}: two runs share a prefix, and this replica (rank {life.rank} of run {life.manifest.run_id!r}) "
            "stops before they mix. Give every run a prefix of its own; to go on with this run, put its manifest back."
        )


def check_run(life: Life) -> None:
    """See that the prefix is still the run's, where that was last seen a grace ago or more.

    A life that has stood still may wake up on a prefix that was emptied meanwhile and is another run's by now, and must leave
    that as it is. So this is called before everything that a life writes or deletes, and while it waits.

    Raises:
        RunExistsError: Another run's manifest has taken the place of this run's.
        FormatError: The same, and another version has written it.
    """
    if life.timing.clock() - life.seen.at >= life.settings.grace:
        watch_manifest(life)


def _check_unused(store: Patient) -> None:
    """Refuse to begin a run over the remains of another one."""
    claims = store.list("claims/")
    if any(map(_STRICT_CLAIM.fullmatch, claims)):
        raise RunExistsError(
            f"{store.uri} holds claims of a strict run, which no elastic replica can join"
        )
    # Before a manifest there is nothing but initial states. Whoever comes at the same moment and is faster has one by now.
    left = [*filter(is_claim, claims), *filter(commit_sync, store.list("commits/"))]
    left = left or [key for key in store.list("state/") if any(states([key]))]
    if left and store.get(MANIFEST) is None:
        raise RunExistsError(
            f"{store.uri} holds the remains of a run ({left[0]}), but no {MANIFEST}: that was removed. Put it back to go on "
            "with that run (replicas that still run do that by themselves, every few syncs), remove "
            "everything below the prefix, or begin the new run on another prefix."
        )


def _initial(
    store: Patient,
    jobs: Sequence[ResumableJob],
    schema: Schema,
    rank: int,
    world_size: int,
    run_id: str,
    settings: Elastic,
    chunk_bytes: int,
) -> Manifest:
    nonce = secrets.token_hex(8)

    def publish(index: int, number: int) -> Sums:
        job = jobs[index]
        shard = published_shard(job, 0, number, nonce, chunk_bytes)
        written: list[Sums] = []
        parts = partial(shard.parts, shard_metadata(job, 0), written.append)
        store.put(
            shard_key(0, index, number, nonce), parts if store.near else lambda: list(parts())
        )
        return written[-1]

    numbers = [
        (index, number) for index, job in enumerate(jobs) for number in range(job.layout.shards)
    ]
    sums: list[list[Sums]] = [[] for _ in jobs]
    at_once = store.store.creates_at_once if isinstance(store.store, InBackground) else 1
    published = in_parallel(store.store, (partial(publish, *each) for each in numbers), at_once)
    for (index, _), each in zip(numbers, published, strict=True):
        sums[index].append(each)
    largest = max(layout_bytes(job.layout) for job in jobs)
    return Manifest(
        run_id=run_id,
        writer=rank,
        world_size=world_size,
        min_replicas=settings.min_replicas,
        topology=choose_topology(
            settings.topology,
            state_bytes=largest,
            world_size=world_size,
            publish_every=settings.publish_every,
            near=store.near,
            transfer=store.store.transfer if isinstance(store.store, InBackground) else None,
            outer_state=schema.outer_state(),
        ),
        publish_every=settings.publish_every,
        retention=settings.retention,
        settings=dict(schema.settings),
        tensors=dict(schema.tensors),
        fragments=[dict(table) for table in schema.fragments],
        initial=nonce,
        sums=[[each.values for each in row] for row in sums],
        rests=[[each.rest for each in row] for row in sums],
        unsynced={} if schema.unsynced is None else schema.unsynced.publish(store.put),
    )
