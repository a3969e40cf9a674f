"""How a life begins: it reads the run's manifest, or begins the run and creates the manifest."""

from __future__ import annotations

import logging
import re
import secrets
from functools import partial
from typing import TYPE_CHECKING

from .._arithmetic._rate import NO_RATE
from .._errors import CorruptedObjectError, RendezvousError, RunExistsError
from .._store._api import InBackground
from .._store._copies import copy_key
from .._store._reread import read_again
from ._beginning import beginning, wait_for_manifest
from ._compare import check_same_run
from ._life._progress import layout_bytes
from ._policy._meeting import check_failures
from ._policy._together import sums_of_all, upload, upload_own
from ._records._keys import MANIFEST, commit_sync, epochs, is_claim
from ._records._manifest import Manifest
from ._records._rules import states
from ._settings import choose_topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .._exchange._base import Schema
    from .._exchange._resumable import ResumableJob
    from .._store._patient import Patient
    from ._settings import Joiner

_EARLIER_CLAIM = re.compile(r"claims/[0-9]{5}\.json")

_log = logging.getLogger("diloco_core")


def open_run(
    store: Patient, jobs: Sequence[ResumableJob], schema: Schema, joiner: Joiner, loaded: str = ""
) -> Manifest:
    """The run's manifest. If no other replica creates it, this one does, after uploading its initial state.

    Rank 0 uploads its initial state at once. The others wait; if for a grace no replica has shown that it is uploading, one of
    them uploads its own. The replica that creates the manifest decides: all replicas take the state that the manifest names.

    Args:
        store: The run's prefix.
        jobs: All fragments, in the order in which they are synced.
        schema: What all replicas must have in common.
        joiner: This replica.
        loaded: The name of the state that was loaded, if one was. The others have to upload their parts of it, too.

    Raises:
        RendezvousError: There is no run to resume.
        RunExistsError: The prefix belongs to another run.
        MismatchError: This replica has another model or other settings.
        ConfigurationError: A setting has no effect in the topology that ``auto`` chooses.
    """
    rank, settings = joiner.rank, joiner.settings
    manifest = _read_or_restore(store)
    if manifest is None and settings.resume:
        _check_unused(store)
        raise RendezvousError(
            f"{store.uri} holds no run to resume: there is no {MANIFEST}. Check the URI, or leave resume out to begin a new run."
        )
    if manifest is None:
        # Before anybody waits: replicas with the same settings are refused at the same time.
        topology = _topology(store, jobs, schema, joiner)
    if manifest is None and rank != 0:
        if loaded:
            upload_own(store, jobs, loaded, joiner)

        def look_around() -> None:
            """Look whether waiting for rank 0 of a fixed run is of no use: what refuses it without a word refuses this rank."""
            if settings.fixed:
                check_failures(store, rank, committed_in(schema) + 1)
                _check_unused(store)

        manifest = wait_for_manifest(store, joiner, partial(read_manifest, store), look_around)
    if manifest is None:
        manifest = _begin(store, jobs, schema, joiner, topology, loaded)
    check_same_run(
        manifest,
        schema,
        joiner,
        uri=store.uri,
        first=settings.fixed and not any(epochs(store.list(f"claims/{rank:05}/"), rank)),
    )
    # Only the first life of rank 0 expects that its initial values are used.
    if rank == 0 and manifest.writer != 0 and not any(epochs(store.list("claims/00000/"), 0)):
        _log.warning(
            "rank 0: the run at %s was begun by rank %d with the initial values of that rank, because rank 0 had given no sign "
            "for a grace. The initial values of this replica are not used.",
            store.uri,
            manifest.writer,
        )
    return manifest


def _begin(
    store: Patient,
    jobs: Sequence[ResumableJob],
    schema: Schema,
    joiner: Joiner,
    topology: str,
    loaded: str,
) -> Manifest:
    """Begin the run with this replica's initial state. Returns its manifest: another replica may be faster."""
    _check_unused(store)
    _remove_leftover(store)
    with beginning(store, joiner):
        own_manifest = _initial(store, jobs, schema, joiner, topology, loaded)
        store.create(MANIFEST, own_manifest.to_json)
    manifest = read_manifest(store)
    if manifest is None:
        raise CorruptedObjectError(
            f"{store.uri}/{MANIFEST} was created, but is not there any more: something else has deleted it. Find out what "
            "does, and start again."
        )
    if manifest.initial == own_manifest.initial:
        store.put(copy_key(MANIFEST), lambda: [own_manifest.to_json()])
    else:
        # The state that this replica uploaded is not used.
        store.delete(store.list(f"initial/{own_manifest.initial}/"))
        if own_manifest.unsynced:
            store.delete(store.list(f"{own_manifest.unsynced['folder']}/"))
    return manifest


def committed_in(schema: Schema) -> int:
    """The number of outer steps that a model had taken when its run began."""
    return int(schema.settings.get("committed", "0"))


def read_manifest(store: Patient) -> Manifest | None:
    """The manifest; None if there is none.

    Raises:
        CorruptedObjectError: It is damaged in the store.
        FormatError: Another version has written it.
        RunExistsError: It is the manifest of a kind of run that only earlier versions know.
    """
    try:
        return read_again(store.timing, lambda: stored_manifest(store))
    except CorruptedObjectError as error:
        raise _unreadable(error) from error


def _read_or_restore(store: Patient) -> Manifest | None:
    """The manifest; None if there is none. If it is damaged or gone, it is written again from its copy.

    Raises as :func:`read_manifest` does.
    """
    damage: CorruptedObjectError | None = None
    try:
        manifest = read_again(store.timing, lambda: stored_manifest(store))
        if manifest is not None:
            return manifest
    except CorruptedObjectError as error:
        damage = error
    key = copy_key(MANIFEST)
    try:
        copy = read_again(store.timing, lambda: stored_manifest(store, key))
    except CorruptedObjectError:
        copy = None
    if damage is not None and copy is None:
        raise _unreadable(damage) from damage
    if damage is None and copy is not None:
        # The replica that begins the run may have written both since: the manifest first, and then the copy.
        manifest = read_manifest(store)
        if manifest is not None:
            return manifest
    # Without anything else of the run, the copy is only a leftover, and a new run may begin.
    if copy is None or (damage is None and not _remains(store, store.list("claims/"))):
        return None
    _log.error(
        "%s. It is written again from its copy %s. Something outside this run deletes or changes its objects: find out what "
        "does, and stop it.",
        f"{store.uri}/{MANIFEST} is gone" if damage is None else str(damage).rstrip("."),
        key,
    )
    if damage is None:
        store.create(MANIFEST, copy.to_json)
    else:
        store.put(MANIFEST, lambda: [copy.to_json()])
    return read_manifest(store)


def _unreadable(damage: CorruptedObjectError) -> CorruptedObjectError:
    return CorruptedObjectError(
        f"{str(damage).rstrip('.')}. Without this object or its copy {copy_key(MANIFEST)} nothing of the run can be read, and "
        "resume='newest-whole' does not help. If a replica of the run is still running, that replica will write the object "
        "again: start this one later. Otherwise restore it from a backup, or begin a new run on another prefix."
    )


def stored_manifest(store: Patient, key: str = MANIFEST) -> Manifest | None:
    """The manifest under its key, or under that of its copy, read once; None if there is none."""
    data = store.get(key)
    return None if data is None else Manifest.from_json(data, f"{store.uri}/{key}")


def _remains(store: Patient, claims: Iterable[str]) -> list[str]:
    """Keys of objects that a run writes only when its manifest is there; ``claims`` are those under ``claims/``."""
    remains = [*filter(is_claim, claims), *filter(commit_sync, store.list("commits/"))]
    return remains or [key for key in store.list("state/") if any(states([key]))]


def _check_unused(store: Patient) -> None:
    """Refuse to begin a run where objects of another run are left."""
    claims = store.list("claims/")
    if any(map(_EARLIER_CLAIM.fullmatch, claims)):
        raise RunExistsError(
            f"{store.uri} holds claims of a run that an earlier version of diloco-core has begun: give this run a prefix of its "
            "own."
        )
    # A run that has not created its manifest yet has written only initial states. A replica that began the run at the same
    # moment and was faster has created the manifest by now.
    remains = _remains(store, claims)
    if remains and store.peek(MANIFEST) is None:
        raise RunExistsError(
            f"{store.uri} holds objects of an earlier run (such as {remains[0]}), but its {MANIFEST} is missing, and the copy of "
            "it is missing or damaged. To continue that run, put the manifest back (replicas of it that are still running do so "
            "by themselves, every few syncs). To begin a new run, use another prefix, or delete everything below this one."
        )


def _remove_leftover(store: Patient) -> None:
    """Delete a copy of an earlier run's manifest, which would be believed if this process died before it has written its own."""
    key = copy_key(MANIFEST)
    if store.read(key, lambda _: True) and store.peek(MANIFEST) is None:
        store.delete([key])


def _topology(store: Patient, jobs: Sequence[ResumableJob], schema: Schema, joiner: Joiner) -> str:
    """The topology of a run that this replica begins; refuses settings that have no effect in it."""
    settings = joiner.settings
    topology = choose_topology(
        settings.topology,
        state_bytes=max(layout_bytes(job.layout) for job in jobs),
        world_size=joiner.world_size,
        publish_every=settings.published_every,
        near=store.near,
        transfer=store.store.transfer if isinstance(store.store, InBackground) else None,
        outer_state=schema.outer_state(),
        codec=schema.terms.codec,
        coded=schema.terms.coding is not None,
    )
    settings.check_chosen(topology)
    return topology


def _initial(
    store: Patient,
    jobs: Sequence[ResumableJob],
    schema: Schema,
    joiner: Joiner,
    topology: str,
    loaded: str,
) -> Manifest:
    """Upload this replica's initial state. Returns the manifest that names it, which is not written yet.

    If it was loaded (``loaded`` is the name of the state), the others have uploaded their parts of it.
    """
    settings = joiner.settings
    stateful = [] if schema.settings.get("operation") else jobs  # plain means have no state
    shards = [range(job.layout.shards) for job in stateful]
    numbers = [(index, number) for index, each in enumerate(shards) for number in each]
    nonce = loaded or secrets.token_hex(8)
    written = (
        sums_of_all(store, stateful, nonce, joiner)
        if loaded
        else upload(store, stateful, nonce, numbers, joiner.chunk_bytes)
    )
    sums = [[written[index, number] for number in each] for index, each in enumerate(shards)]
    return Manifest(
        run_id=joiner.run_id,
        writer=joiner.rank,
        world_size=joiner.world_size,
        min_replicas=settings.min_replicas,
        topology=topology,
        publish_every=settings.published_every,
        retention=settings.retention,
        settings=dict(schema.settings),
        tensors=dict(schema.tensors),
        fragments=[dict(table) for table in schema.fragments],
        initial=nonce,
        sums=[[shard_sums.values for shard_sums in row] for row in sums],
        rests=[[shard_sums.rest for shard_sums in row] for row in sums],
        unsynced={} if schema.unsynced is None else schema.unsynced.publish(store.put),
        membership="fixed" if settings.fixed else "elastic",
        rate=jobs[0].rate if loaded else NO_RATE,
    )
