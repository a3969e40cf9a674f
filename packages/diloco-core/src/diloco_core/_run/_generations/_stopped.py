"""Whether the processes of a generation have ended: none of its ranks is taken over before.

A process has ended if it has said so, if it is known to be gone from this machine, or if its sign of life has not changed for
``lost_after`` seconds by the clock of this process.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import RunExistsError
from ..._exchange._endings import named_ranks
from ..._host import is_gone
from ..._store._ahead import in_parallel
from .._claims import read_claim
from .._policy._beats import interval_of, read_beats
from .._records._keys import farewells, highest_epochs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..._store._patient import Patient
    from ..._wire._fields import Fields

_READS_AT_ONCE = 16

_log = logging.getLogger("diloco_core")


def check_stopped(store: Patient, rank: int) -> None:
    """Wait until it is certain that the processes of a generation have ended.

    Args:
        store: The folder of the generation.
        rank: The rank of this process, for messages.

    Raises:
        RunExistsError: A process is alive; the error names its rank.
    """
    left = {(hint.rank, hint.epoch) for hint in farewells(store.list("deltas/"))}
    lives = [life for life in highest_epochs(store.list("claims/")).items() if life not in left]
    gone = in_parallel(
        store.store, (partial(_gone, store, *life) for life in lives), _READS_AT_ONCE
    )
    ranks = [other for (other, _), is_known in zip(lives, gone, strict=True) if not is_known]
    if not ranks:
        return
    timing, beats = store.timing, read_beats(store, ranks)
    seconds = max(timing.lost_after, min(2 * max(map(interval_of, beats)), timing.sync_timeout))
    _log.warning(
        "rank %d: the run at %s is resumed. These ranks have not said how they ended, so their signs of life are watched for "
        "%g s: %s",
        rank,
        store.uri,
        seconds,
        named_ranks(ranks),
    )

    def are_silent() -> bool:
        for other, first, now in zip(ranks, beats, read_beats(store, ranks), strict=True):
            if now != first:
                raise RunExistsError(
                    f"rank {other} of the run at {store.uri} is alive: it has given a sign of life just now. Only a run that has "
                    "stopped can be resumed, by all of its ranks together. End that process, or wait until it has ended by "
                    "itself (when one rank is lost, the others end with an error), and then start all ranks again with "
                    "resume=True."
                )
        return True

    watch(store, seconds, are_silent)


def watch(store: Patient, seconds: float, is_silent: Callable[[], bool]) -> None:
    """Watch for so many seconds by the clock of this process whether others are silent; end sooner where this returns False.

    Where the store was away for so long that signs were missed, all of them get the whole time again.
    """
    timing, downtime = store.timing, store.downtime
    start = timing.clock() - downtime
    while timing.clock() - store.downtime - start <= seconds:
        timing.sleep(min(timing.beat_interval, seconds / 10))
        if not is_silent():
            return
        if store.downtime - downtime > timing.beat_interval:
            downtime = store.downtime
            start = timing.clock() - downtime


def _gone(store: Patient, rank: int, epoch: int) -> bool:
    """Whether it is certain that the process which has claimed an epoch is gone from this machine."""

    def parse(fields: Fields) -> bool:
        return is_gone(fields.whole("pid"), fields.text("host"))

    return read_claim(store, rank, epoch, parse) or False
