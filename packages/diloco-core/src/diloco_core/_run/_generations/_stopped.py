"""Whether the processes of a generation have ended: none of its ranks is taken over before.

A process has ended if it has said so, if it is known to be gone from this machine, or if its sign of life has not changed for
``lost_after`` seconds by the clock of this process.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, FormatError, RunExistsError
from ..._exchange._endings import named_ranks
from ..._host import is_gone
from ..._store._parallel import in_parallel
from ..._wire._fields import Fields
from ..._wire._sealed import unseal
from .._records._keys import Hint, beat_key, claim_key, highest_epochs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._store._patient import Patient
    from ..._timing import Timing

_READS_AT_ONCE = 16
_LARGEST_BEAT = 128

_log = logging.getLogger("diloco_core")


def check_stopped(store: Patient, timing: Timing, rank: int) -> None:
    """Wait until it is certain that the processes of a generation have ended.

    Args:
        store: The folder of the generation.
        timing: ``lost_after`` and ``beat_interval``, and the clock.
        rank: The rank of this process, for messages.

    Raises:
        RunExistsError: A process is alive; the error names its rank.
    """
    hints = filter(None, map(Hint.parse, store.list("deltas/")))
    left = {(hint.rank, hint.epoch) for hint in hints if hint.event == "leave"}
    lives = [life for life in highest_epochs(store.list("claims/")).items() if life not in left]
    gone = in_parallel(
        store.store, (partial(_gone, store, *life) for life in lives), _READS_AT_ONCE
    )
    ranks = [other for (other, _), is_known in zip(lives, gone, strict=True) if not is_known]
    if not ranks:
        return
    beats = _beats(store, ranks)
    named = [float(beat.split(b" ")[1]) for beat in beats if _names_interval(beat)]
    seconds = max(timing.lost_after, min(2 * max(named, default=0.0), timing.sync_timeout))
    _log.warning(
        "rank %d: the run at %s is resumed. These ranks have not said how they ended, so their signs of life are watched for "
        "%g s: %s",
        rank,
        store.uri,
        seconds,
        named_ranks(ranks),
    )
    downtime = store.downtime
    start = timing.clock() - downtime
    while timing.clock() - store.downtime - start <= seconds:
        timing.sleep(min(timing.beat_interval, timing.lost_after / 10))
        for other, first, now in zip(ranks, beats, _beats(store, ranks), strict=True):
            if now != first:
                raise RunExistsError(
                    f"rank {other} of the run at {store.uri} is alive: it has given a sign of life just now. Only a run that has "
                    "stopped can be resumed, by all of its ranks together. End that process, or wait until it has ended by "
                    "itself (when one rank is lost, the others end with an error), and then start all ranks again with "
                    "resume=True."
                )
        if store.downtime - downtime > timing.beat_interval:
            # The store was away for so long that signs were missed: all of them get the whole time again.
            downtime = store.downtime
            start = timing.clock() - downtime


def _beats(store: Patient, ranks: Sequence[int]) -> list[bytes]:
    reads = (partial(store.peek, beat_key(rank), _LARGEST_BEAT) for rank in ranks)
    return [beat or b"" for beat in in_parallel(store.store, reads, _READS_AT_ONCE)]


def _names_interval(beat: bytes) -> bool:
    parts = beat.split(b" ")
    return len(parts) > 1 and parts[1].replace(b".", b"", 1).isdigit()


def _gone(store: Patient, rank: int, epoch: int) -> bool:
    """Whether it is certain that the process which has claimed an epoch is gone from this machine."""
    key = claim_key(rank, epoch)
    data = store.peek(key)
    try:
        if not data:
            return False
        fields = Fields(unseal("claim", key, data, f"{store.uri}/{key}"), f"{store.uri}/{key}")
        return is_gone(fields.whole("pid"), fields.text("host"))
    except (CorruptedObjectError, FormatError):
        return False
