"""Which state of a strict run is resumed: the newest one that is whole for every fragment. Pure, but for what it is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._records import committed_sync
from .._sync._objects import shard_listed, shards_listed, state_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .._manifest import Manifest


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
        listed: The keys below ``state/``.
        commits: The keys below ``commits/``.
        finished: How many syncs replicas have finished that have said so when they ended.
    """
    count = len(manifest.fragments)
    published = {sync for run, sync in shards_listed(listed) if _counts(manifest, run, sync)}
    committed = filter(None, map(committed_sync, commits))
    begun = published | {sync for run, sync in committed if _counts(manifest, run, sync)}
    # All replicas have finished a sync before any of them contributes to the next one. And a life that has not come to a sync
    # of its own yet goes on from the last one of the life before.
    ends = [last for _, last in manifest.earlier]
    least = max([*(sync - 1 for sync in begun), *(number - 1 for number in finished), *ends, -1])
    whole = [
        sync
        for sync in sorted(published, reverse=True)
        if sync >= count - 1 and not missing_keys(manifest, listed, sync)
    ]
    return States(whole, least if least >= count - 1 else -1)


def of_unknown_lives(
    manifest: Manifest, keys: Iterable[str], lives: Iterable[int], before: float = math.inf
) -> list[str]:
    """Keys of objects that show that the manifest of a later life is gone: nothing is published before it is written.

    Objects of unknown lives alone show nothing: a process of another run, whose prefix was emptied, may have written them.

    Args:
        manifest: The newest manifest that can be read.
        keys: Keys of published shards and of commit records.
        lives: Which lives rank 0 has claimed.
        before: Only lives with lower numbers count; if left out, all.
    """
    if not any(manifest.life < life < before for life in lives):
        return []
    runs = {key: committed_sync(key) or shard_listed(key) for key in keys}
    return sorted(key for key, of in runs.items() if of and of[0] not in manifest.names)


def missing_keys(manifest: Manifest, listed: Collection[str], sync: int) -> list[str]:
    """Keys of the objects that are missing from the whole model's state after a sync."""
    return [
        key
        for index, last in enumerate(manifest.last_syncs(sync))
        for key in keys_of(manifest, index, last)
        if key not in listed
    ]


def keys_of(manifest: Manifest, index: int, sync: int) -> list[str]:
    """Keys of the shards of a fragment's state after a sync of it."""
    run = manifest.run_of(sync)
    return [state_key(run, sync, shard) for shard in range(manifest.fragments[index]["shards"])]


def _counts(manifest: Manifest, run: str, sync: int) -> bool:
    """Whether the sync of a life, of whose name only the beginning is known, counts."""
    return manifest.run_of(sync).startswith(run)
