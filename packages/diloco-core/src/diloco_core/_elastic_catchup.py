"""Catching up with the log: the newest published state, then every sync that was committed after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._elastic_adopt import Adoption
from ._elastic_life import Reload
from ._elastic_start import load
from ._errors import CorruptedObjectError, DivergedError

if TYPE_CHECKING:
    from ._elastic_life import Life

_MOST_RELOADS = 5


def catch_up(life: Life) -> None:
    """Take the newest state that the store holds, finishing what others left undone.

    Raises:
        CorruptedObjectError: The store does not hold what its records promise.
        DivergedError: Replaying the log gives other values than the others had.
    """
    for progress in life.fragments:
        progress.job.begin()
    for _ in range(_MOST_RELOADS):
        try:
            load(life)
            replay(life)
            break
        except Reload as reason:
            cause = reason.__cause__
    else:
        raise cause or CorruptedObjectError(f"the state in {life.store.uri} kept changing while it was read")
    for progress in life.fragments:
        progress.job.finish()


def replay(life: Life) -> None:
    """Adopt every sync that is committed and not adopted yet."""
    while (found := life.commit(life.sync + 1)) is not None:
        commit, record = found
        life.verify(commit)
        progress = life.fragments[commit.fragment]
        if commit.sync <= progress.sync:
            life.skip(commit, record)
            continue
        if commit.base != progress.digest:
            raise diverged(life.rank)
        Adoption(life, commit, local=False).run()
        life.advance(commit, record)


def diverged(rank: int) -> DivergedError:
    """The error of a replica that computes other values than the others."""
    return DivergedError(
        f"rank {rank} computes other values than most other replicas, also from the published state. Different kinds of "
        "processors round differently: use topology='sharded', where every shard is computed once and all read the same "
        "bytes."
    )
