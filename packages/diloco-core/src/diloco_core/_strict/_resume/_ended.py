"""Whether a run has stopped: whether the processes have ended that its newest manifest names. No rank is taken over before.

A process has ended if it has left a note that says so, if it is known to be gone from this machine, or if its beat has not
changed for ``lost_after`` seconds by the clock of this process. A process that beats less often, according to its claim, gets
twice the time between its beats. Time in which this process cannot reach the store does not count.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, FormatError, RunExistsError
from ..._exchange._endings import named_ranks
from ..._host import is_gone
from ..._store._parallel import in_parallel
from .._claims import READS_AT_ONCE, read_claim
from .._records._records import beat_key, claimed, note_key, read_note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..._store._patient import Patient
    from ..._timing import Timing
    from .._records._manifest import Manifest
    from .._records._records import Claim

_log = logging.getLogger("diloco_core")


def next_life(store: Patient, manifest: Manifest, rank: int) -> int:
    """The next life of a rank."""
    lives = [life for claimed_rank, life in claimed(store.list("claims/")) if claimed_rank == rank]
    return max([*lives, manifest.members[rank][0]]) + 1


def check_not_claimed(store: Patient, manifest: Manifest, rank: int, life: int) -> None:
    """Check that no other process has claimed the rank while this one watched the signs of life.

    Creating the claim would show that too, but not in a store that ignores conditional writes.

    Raises:
        RunExistsError: Another process has claimed the life.
    """
    if next_life(store, manifest, rank) != life:
        raise RunExistsError(
            f"another process has begun to resume rank {rank} of the run at {store.uri} in the meantime. Start every rank only "
            "once."
        )


def check_ended(store: Patient, timing: Timing, manifest: Manifest, rank: int, before: int) -> None:
    """Wait until it is certain that the run has stopped.

    The last process of this replica's own rank is looked at too, if it belongs to an earlier attempt to resume the run. For
    other ranks, such processes need no check: each of those attempts also needed a process of this replica's rank.

    Args:
        store: The run's prefix.
        timing: ``lost_after`` and ``beat_interval``, and the clock.
        manifest: The newest manifest.
        rank: The rank of this replica.
        before: The life of its rank that this process will be.

    Raises:
        RunExistsError: A process is alive; the error names its rank.
    """
    processes: dict[tuple[int, int], str | None] = {
        (other, life): nonce for other, (life, nonce) in enumerate(manifest.members)
    }
    if (rank, before - 1) not in processes:
        claim = _claim(store, timing, rank, before - 1)
        processes[rank, before - 1] = None if claim is None else claim.nonce
    open_ones = {
        process: nonce for process, nonce in processes.items() if not _noted(store, *process, nonce)
    }
    if not open_ones:
        return
    claims = in_parallel(
        store.store,
        (partial(_claim, store, timing, *process) for process in open_ones),
        READS_AT_ONCE,
    )
    # A claim that cannot be read, or is not that of the process, says nothing about it.
    own = {
        process: claim if claim is not None and open_ones[process] in {None, claim.nonce} else None
        for process, claim in zip(list(open_ones), claims, strict=True)
    }
    watched = [p for p, claim in own.items() if claim is None or not is_gone(claim.pid, claim.host)]
    if not watched:
        return
    beating = [claim for claim in map(own.get, watched) if claim is not None]
    seconds = max([timing.lost_after, *(claim.silence(timing.lost_after) for claim in beating)])
    _log.warning(
        "rank %d: the run at %s is resumed. These ranks have not said how they ended, so their signs of life are watched for "
        "%g s: %s",
        rank,
        store.uri,
        seconds,
        named_ranks(sorted({other for other, _ in watched})),
    )
    _watch(store, timing, watched, seconds)


def _watch(
    store: Patient, timing: Timing, processes: Iterable[tuple[int, int]], seconds: float
) -> None:
    """Wait until no beat of these processes has changed for so many seconds."""
    beats = {process: _beat(store, *process) for process in processes}
    downtime = store.downtime
    start = timing.clock() - downtime
    while timing.clock() - store.downtime - start <= seconds:
        timing.sleep(min(timing.beat_interval, timing.lost_after / 10))
        for (rank, life), beat in beats.items():
            if _beat(store, rank, life) != beat:
                raise RunExistsError(
                    f"rank {rank} of the run at {store.uri} is alive: it has given a sign of life just now. Only a run that has "
                    "stopped can be resumed, by all of its ranks together. End that process, or wait until it has ended by "
                    "itself (when one replica of a strict run is lost, the others end with an error), and then start all ranks "
                    "again with resume=True."
                )
        if store.downtime - downtime > timing.beat_interval:
            # The store was away for so long that beats were missed: all of them get the whole time again.
            downtime = store.downtime
            start = timing.clock() - downtime


def _noted(store: Patient, rank: int, life: int, nonce: str | None) -> bool:
    """Whether a process has left a note that says how it ended."""
    key = note_key(rank, life)
    data = store.peek(key)
    if data is None:
        return False
    try:
        _, writer = read_note(data, rank, f"{store.uri}/{key}", life)
    except (CorruptedObjectError, FormatError) as error:
        _log.warning("a note that says how rank %d ended cannot be read: %s", rank, error)
        return False
    return nonce is None or writer == nonce


def _claim(store: Patient, timing: Timing, rank: int, life: int) -> Claim | None:
    """The claim of a process; None if it is gone or cannot be read."""
    try:
        return read_claim(store, rank, timing, life)
    except (CorruptedObjectError, FormatError):
        return None


def _beat(store: Patient, rank: int, life: int) -> bytes:
    return store.peek(beat_key(rank, life), largest=64) or b""
