"""Which states of a strict run the store shows, and which of its syncs count. Pure, but for what it is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, FormatError
from .._store._copies import copy_key
from ._inner import inner_listed
from ._records._manifest import manifest_key
from ._records._records import claimed, committed_sync, note_key, read_note
from ._sync._objects import contribution_listed, shard_listed, shards_listed, state_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ._records._manifest import Manifest


@dataclass(frozen=True, slots=True)
class States:
    """The states of a run that a listing shows.

    Attributes:
        whole: Numbers of syncs after which all objects of the whole model are there, the newest first.
        least: The number of a sync after which the model must have been whole, since later objects show it; -1 if nothing does.
    """

    whole: list[int]
    least: int


def states(
    manifest: Manifest, listed: Collection[str], commits: Iterable[str], finished: Iterable[int]
) -> States:
    """The states of a run.

    Args:
        manifest: The run's newest manifest.
        listed: The keys under ``state/``.
        commits: The keys under ``commits/``.
        finished: What :func:`finished_syncs` and :func:`syncs_before` returned.
    """
    count = len(manifest.fragments)
    published = published_syncs(manifest, listed)
    begun = published | committed_syncs(manifest, commits)
    # All replicas have finished a sync before any of them contributes to the next one. And a run that was resumed, and has not
    # come to a sync since, goes on from the last sync before.
    ends = [last for _, last in manifest.earlier]
    least = max([*(sync - 1 for sync in begun), *(number - 1 for number in finished), *ends, -1])
    whole = [
        sync
        for sync in sorted(published, reverse=True)
        if sync >= count - 1 and not missing_keys(manifest, listed, sync)
    ]
    return States(whole, least if least >= count - 1 else -1)


def published_syncs(manifest: Manifest, listed: Iterable[str]) -> set[int]:
    """The syncs that count and of which at least one shard is among the keys under ``state/``."""
    return {sync for run, sync in shards_listed(listed) if manifest.counts(run, sync)}


def committed_syncs(manifest: Manifest, commits: Iterable[str]) -> set[int]:
    """The syncs that count and whose record is among the keys under ``commits/``."""
    committed = filter(None, map(committed_sync, commits))
    return {sync for run, sync in committed if manifest.counts(run, sync)}


def finished_syncs(manifest: Manifest, uri: str, read: Callable[[str], bytes | None]) -> list[int]:
    """How many syncs the processes had finished that have left a note when they ended; those that the newest manifest names.

    Notes are only one of several sources, so what cannot be read is left out.

    Args:
        manifest: The run's newest manifest.
        uri: Where the run is.
        read: Given a key, returns the stored object; None if there is none.
    """
    numbers = []
    for rank, (life, nonce) in enumerate(manifest.members):
        key = note_key(rank, life)
        try:
            data = read(key)
            if data is None:
                continue
            ending, writer = read_note(data, rank, f"{uri}/{key}", life)
        except (CorruptedObjectError, FormatError):
            continue
        if writer == nonce:
            numbers.append(ending.progress.number)
    return numbers


def syncs_before(
    manifest: Manifest, contributions: Iterable[str], saved: Iterable[str]
) -> list[int]:
    """How many syncs a replica had finished before it contributed to the next one, or when it saved its inner state.

    Args:
        manifest: The run's newest manifest.
        contributions: The keys under ``deltas/``.
        saved: The keys under ``inner/``.
    """
    begun = filter(None, map(contribution_listed, contributions))
    finished = filter(None, map(inner_listed, saved))
    return [
        *(sync for run, sync in begun if manifest.counts(run, sync)),
        *(sync + 1 for run, sync in finished if manifest.counts(run, sync)),
    ]


def unknown_names(manifest: Manifest, keys: Iterable[str]) -> dict[str, str]:
    """Names that are in the keys of published objects and that the manifest does not know, each with one of these keys.

    Args:
        manifest: The newest manifest that can be read.
        keys: Keys of published shards and of commit records.
    """
    known = manifest.names.union(manifest.given_up)
    syncs = {key: committed_sync(key) or shard_listed(key) for key in sorted(keys, reverse=True)}
    return {sync[0]: key for key, sync in syncs.items() if sync and sync[0] not in known}


def lost_manifest(
    manifest: Manifest,
    keys: Iterable[str],
    claims: Iterable[str],
    uri: str,
    before: float = math.inf,
) -> str:
    """Whether objects show that a later manifest is gone: a sentence that says so, or "".

    Nothing is published under a name before its manifest is written. But unknown names alone show nothing: they may be those of
    another run whose prefix was emptied, and one of whose processes is still alive. A later life of rank 0 has to show that
    there could be a later manifest.

    Args:
        manifest: The newest manifest that can be read.
        keys: Keys of published shards and of commit records.
        claims: The keys under ``claims/``, which show how many lives rank 0 has had.
        uri: Where the run is.
        before: Only lives of rank 0 before this one matter; if left out, all.
    """
    lives = sorted(life for rank, life in claimed(claims) if rank == 0)
    missing = [manifest_key(life) for life in lives if manifest.life < life < before]
    unknown = unknown_names(manifest, keys)
    if not missing or not unknown:
        return ""
    which = missing[0] if len(missing) == 1 else f"one of {', '.join(missing)}"
    return (
        f"{uri} holds {min(unknown.values())}, which the run has published after it was resumed, but no manifest says so: an "
        f"object under manifests/ is damaged, or something else has deleted it ({which}). If you have a copy, put it back."
    )


def missing_keys(manifest: Manifest, listed: Collection[str], sync: int) -> list[str]:
    """Keys of the objects that are missing from the whole model's state after a sync, and that have no copy either."""
    return [
        key
        for index, last in enumerate(manifest.last_syncs(sync))
        for key in missing_shards(manifest, index, last, listed)
    ]


def missing_shards(manifest: Manifest, index: int, sync: int, listed: Collection[str]) -> list[str]:
    """Keys of the missing objects, without copies, from which a fragment's state after a sync of it is made."""
    keys = needed_keys(manifest, index, sync)
    return [key for key in keys if key not in listed and copy_key(key) not in listed]


def needed_keys(manifest: Manifest, index: int, sync: int) -> list[str]:
    """Keys of all objects from which a fragment's state after a sync of it is made."""
    syncs = manifest.full_states(index).needed(sync)
    return [key for needed in syncs for key in keys_of(manifest, index, needed)]


def keys_of(manifest: Manifest, index: int, sync: int) -> list[str]:
    """Keys of the shards that a sync of a fragment has published."""
    run = manifest.run_of(sync)
    return [state_key(run, sync, shard) for shard in range(manifest.fragments[index]["shards"])]
