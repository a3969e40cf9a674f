"""The meeting of a fixed run's processes where a store cannot decide.

Each says whom it sees, until all say the same.

Every process draws a nonce, and writes the nonces that it sees under a key that only its rank
writes. A process that is dead by then cannot have named a nonce that was drawn later. So those who
all name one another's nonces are there, and are one process of each rank.

Before, each waits until the processes of the earlier generation have ended: none of its ranks is
taken over sooner. A process has ended if it has said so, if it is known to be gone from this
machine, or if its sign of life has not changed for ``lost_after`` seconds by this process's clock.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..._errors import CorruptedObjectError, MismatchError, RendezvousTimeoutError, RunExistsError
from ..._exchange._endings import named_ranks
from ..._host import host_name, is_gone
from ..._store._patient import Patient
from ..._store._reread import in_parallel
from ..._wire._sealed import seal, unsealed_fields
from .._claims import incarnation_is_gone
from .._policy._meeting import await_all
from .._policy._others import interval_of, read_beats
from .._records._keys import farewells, highest_epochs

_READS_AT_ONCE = 16
_LARGEST = 16 * 2**20

_log = logging.getLogger("diloco_core")


@dataclass(frozen=True, slots=True)
class _Word:
    """What a process says.

    Attributes:
        nonce: Its own nonce.
        nonces: The nonces that it sees, by rank; empty where it sees no process.
        number: The lowest number that it would give to the next generation.
        interval: Whole seconds between two of its signs of life, at most.
        host: Where it runs.
        pid: Its process id there.
        data: The bytes that were read.
    """

    nonce: str
    nonces: list[str]
    number: int
    interval: int
    host: str
    pid: int
    data: bytes


def meeting_key(rank: int) -> str:
    """Key of what the newest process of a rank says while it meets the others."""
    return f"meetings/{rank:05}.json"


class Gathering:
    """Meets the other processes, and shows them that this one is there until :meth:`stop`.

    To be used by one thread.

    Args:
        store: The prefix at which they meet.
        rank: The rank of this process.
        world_size: Number of ranks.

    Raises:
        RunExistsError: Another process of the rank is there.
    """

    def __init__(self, store: Patient, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = world_size
        self._timing = store.timing
        self._nonce = secrets.token_hex(8)
        self._said = [""] * world_size
        self._number = 0
        self._stays = False
        self._beats = itertools.count()
        self._stop: Callable[[], None] = bool  # type: ignore[assignment]
        self._await_turn()

    def meet(self, number: int, look_around: Callable[[], None]) -> tuple[int, list[str]]:
        """Wait until all ranks are there and say the same.

        Args:
            number: The lowest number that the next generation may have.
            look_around: Called from time to time; raises an error if waiting is of no use.

        Returns:
            The number of the generation that they begin, and the nonces of its processes by rank.

        Raises:
            RendezvousTimeoutError: Some ranks did not come in time; the error names them.
            MismatchError: A process that is there was given another world size.
            RunExistsError: Another process of this rank has come.
        """
        self._number = number
        self._say()
        failure = f"rank {self._rank} could not show that it is there"
        self._stop = self._store.repeat(self._timing.beat_interval, self._say_again, failure)
        try:
            await_all(self._store, self._rank, self._size, self._look, look_around)
        except RendezvousTimeoutError:
            self._stays = True  # the others are to name those who have never come
            raise
        self.check()
        return self._number, self._said

    def check(self) -> None:
        """Check that no other process of this rank has come since.

        Raises:
            RunExistsError: One has come.
        """
        word = self._read(self._rank)
        if word is not None and word.nonce != self._nonce:
            raise RunExistsError(
                f"another process has joined the run at {self._store.uri} as rank {self._rank}: "
                f"process {word.pid} on {word.host}. Start every rank only once."
            )

    def stop(self) -> None:
        """Say nothing more, since all have met; repeatable."""
        self._stop()
        if self._stays:
            return
        word = self._read(self._rank)
        if word is not None and word.nonce == self._nonce:
            self._store.delete([meeting_key(self._rank)])

    def _await_turn(self) -> None:
        """Make sure that no other process of this rank is about to meet the others."""
        word = self._read(self._rank)
        if word is None or is_gone(word.pid, word.host):
            return
        timing = self._timing
        patience = max(timing.lost_after, min(2 * word.interval, timing.join_timeout))
        _log.warning(
            "rank %d: another process of this rank (process %d on %s) was about to meet the "
            "others at %s. Watching for %g s whether it is still there.",
            self._rank,
            word.pid,
            word.host,
            self._store.uri,
            patience,
        )

        def is_silent() -> bool:
            now = self._read(self._rank)
            if now is not None and now.data != word.data:
                raise RunExistsError(
                    f"another process of rank {self._rank} is joining the run at {self._store.uri} "
                    f"at this moment: process {now.pid} on {now.host}. Start every rank only once."
                )
            return now is not None

        watch(self._store, patience, is_silent)

    def _look(self) -> list[int]:
        """See who is there, and say it. Returns the ranks that do not say the same yet."""
        reads = (partial(self._read, rank) for rank in range(self._size))
        words = list(in_parallel(self._store.store, reads, _READS_AT_ONCE))
        own = words[self._rank]
        if own is not None and own.nonce != self._nonce:
            self.check()
        for rank, word in enumerate(words):
            if word is not None and len(word.nonces) != self._size and self._nonce in word.nonces:
                # The other one sees the same, if this process has named it before it ends.
                self._said = ["" if each is None else each.nonce for each in words]
                self._say()
                self._stays = True
                raise MismatchError(
                    f"rank {rank} at {self._store.uri} was started with "
                    f"world_size={len(word.nonces)}, but rank {self._rank} with "
                    f"world_size={self._size}. Start all ranks with the same one."
                )
        seen = ["" if word is None else word.nonce for word in words]
        seen[self._rank] = self._nonce
        answers = (word for word in words if word is not None and self._nonce in word.nonces)
        number = max([self._number, *(word.number for word in answers)])
        if (seen, number) != (self._said, self._number):
            self._said, self._number = seen, number
            self._say()
        agreed = seen, number
        agree = [each is not None and (each.nonces, each.number) == agreed for each in words]
        return [rank for rank, agrees in enumerate(agree) if rank != self._rank and not agrees]

    def _say(self) -> None:
        key = meeting_key(self._rank)
        fields = {
            "rank": self._rank,
            "nonce": self._nonce,
            "nonces": self._said,
            "number": self._number,
            "interval": math.ceil(self._timing.beat_interval),
            "host": host_name(),
            "pid": os.getpid(),
            "beat": next(self._beats),
        }
        self._store.put(key, lambda: [seal("meeting", key, fields)])

    def _say_again(self) -> None:
        """Show that this process is there, unless another one has taken the key.

        Called by another thread.
        """
        word = self._read(self._rank)
        if word is None or word.nonce == self._nonce:
            self._say()

    def _read(self, rank: int) -> _Word | None:
        """Read what the newest process of a rank says; None if there is nothing to be read."""
        key = meeting_key(rank)
        origin = f"{self._store.uri}/{key}"
        data = self._store.peek(key, _LARGEST)
        if not data:
            return None
        try:
            fields = unsealed_fields("meeting", key, data, origin)
            fields.agree("rank", rank)
            return _Word(
                fields.text("nonce", "[0-9a-f]{16}"),
                fields.texts("nonces", "[0-9a-f]{16}|"),
                fields.whole("number", 0, 999_999),
                fields.whole("interval", 1),
                fields.text("host"),
                fields.whole("pid"),
                data,
            )
        except CorruptedObjectError:
            return None  # its writer writes it again


def check_stopped(store: Patient, rank: int) -> None:
    """Wait until it is certain that the processes of a generation have ended.

    Args:
        store: The folder of the generation.
        rank: The rank of this process, for messages.

    Raises:
        RunExistsError: A process is alive; the error names its rank.
    """
    left = {(hint.rank, hint.epoch) for hint in farewells(store.list("deltas/"))}
    claimed = highest_epochs(store.list("claims/")).items()
    incarnations = [incarnation for incarnation in claimed if incarnation not in left]
    looks = (partial(incarnation_is_gone, store, *incarnation) for incarnation in incarnations)
    gone = in_parallel(store.store, looks, _READS_AT_ONCE)
    ranks = [other for (other, _), is_known in zip(incarnations, gone, strict=True) if not is_known]
    if not ranks:
        return
    timing, beats = store.timing, read_beats(store, ranks)
    seconds = max(timing.lost_after, min(2 * max(map(interval_of, beats)), timing.sync_timeout))
    _log.warning(
        "rank %d: the run at %s is resumed. These ranks have not said how they ended, so their "
        "signs of life are watched for %g s: %s",
        rank,
        store.uri,
        seconds,
        named_ranks(ranks),
    )

    def are_silent() -> bool:
        for other, first, now in zip(ranks, beats, read_beats(store, ranks), strict=True):
            if now != first:
                raise RunExistsError(
                    f"rank {other} of the run at {store.uri} is alive: it has given a sign of life "
                    "just now. Only a run that has stopped can be resumed, by all of its ranks "
                    "together. End that process, or wait until it has ended by itself, as others "
                    "do when one is lost, and then start all ranks again with resume=True."
                )
        return True

    watch(store, seconds, are_silent)


def watch(store: Patient, seconds: float, is_silent: Callable[[], bool]) -> None:
    """Watch, by the clock of this process, whether others stay silent for so many seconds.

    Ends sooner if ``is_silent`` returns False. Where the store was away for so long that signs were
    missed, all of them get the whole time again.
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
