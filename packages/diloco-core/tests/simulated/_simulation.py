"""Whole runs in virtual time: replicas as threads over a faulty store, with a supervisor that
starts the dead again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from diloco_core import Elastic, StoreExchange, Timing

from ._connection import Connection
from ._scheduler import Fault, Killed, Scheduler
from ._store import SimulatedStore


@dataclass(frozen=True, slots=True)
class Fixed:
    """Fixed membership.

    Attributes:
        lost_after: Seconds without a sign of life after which a rank counts as lost.
        resume: Whether a run is continued, or ``"newest-whole"``.
        return_within: Seconds that the others wait for a lost rank to be started again.
    """

    lost_after: float
    resume: bool | Literal["newest-whole"] = False
    return_within: float = 300.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The events of a simulated run.

    Attributes:
        world_size: Number of ranks.
        seed: Seed of all latencies.
        starts: When every rank's first incarnation begins, in virtual seconds.
        faults: What goes wrong.
        restart_after: Seconds until a dead replica is started again.
        latency: Mean seconds of a request.
    """

    world_size: int
    seed: int = 0
    starts: Sequence[float] = ()
    faults: Sequence[Fault] = ()
    restart_after: float = 5.0
    latency: float = 0.02


@dataclass(slots=True)
class Node:
    """One simulated process, as the training function sees it.

    Attributes:
        rank: Its rank.
        incarnation: Which incarnation of the rank, from 1.
        exchange: Its exchange.
        connection: Its access to the store.
        chance: A generator of its own.
    """

    rank: int
    incarnation: int
    exchange: StoreExchange
    connection: Connection
    chance: random.Random

    def sleep(self, seconds: float) -> None:
        """Spend virtual time, training say."""
        self.connection.sleep(seconds)

    def before(self, request: str, act: Callable[[Any], object]) -> None:
        """Call ``act(key)`` before each request of a kind, which is a method of the connection."""
        real = getattr(self.connection, request)

        def act_first(key: Any, *args: Any, **options: Any) -> Any:
            act(key)
            return real(key, *args, **options)

        setattr(self.connection, request, act_first)

    def fault(self, request: str, prefix: str, kind: str, seconds: float = 0.0) -> None:
        """Let something go wrong at the first request of a kind for a key that begins so."""
        due = [prefix]

        def act(key: str) -> None:
            if due and key.startswith(prefix):
                due.clear()
                number = self.connection.operations + 1
                fault = Fault(self.rank, self.incarnation, number, kind, seconds)
                self.connection._faults[number] = fault

        self.before(request, act)


@dataclass(slots=True)
class Outcome:
    """The outcome of a simulated run.

    Attributes:
        store: The store at the end.
        results: What every incarnation returned or raised, by (rank, incarnation).
        finished: Whether every rank had an incarnation that came to its end in time.
        seconds: Virtual seconds that it took.
    """

    store: SimulatedStore
    results: dict[tuple[int, int], Any] = field(default_factory=dict)
    finished: bool = False
    seconds: float = 0.0

    def errors(self) -> dict[tuple[int, int], BaseException]:
        """Return what incarnations raised, other than being killed."""
        return {
            key: value
            for key, value in self.results.items()
            if isinstance(value, BaseException) and not isinstance(value, Killed)
        }


def once(
    train: Callable[[Node], Any],
    schedule: Schedule | int,
    settings: Elastic | Fixed,
    **options: Any,
) -> Outcome:
    """Let every rank live once: nobody is started again; see :func:`simulate`."""
    return simulate(train, schedule, settings, most_incarnations=1, **options)


def simulate(
    train: Callable[[Node], Any],
    schedule: Schedule | int,
    settings: Elastic | Fixed,
    *,
    store: SimulatedStore | None = None,
    sync_timeout: float = 600.0,
    limit: float = 20_000.0,
    most_incarnations: int = 6,
    chunk_bytes: int | None = None,
    prepare: Callable[[Node], object] | None = None,
) -> Outcome:
    """Run ``train(node)`` for every rank of a run, in virtual time and deterministically.

    An incarnation that is killed or raises is followed by the next one, unless another incarnation
    of its rank is there or was done. Only one thread runs at a time, so training functions may
    share what they like.

    Args:
        train: The training function; it uses ``node.exchange`` and spends time by ``node.sleep``.
        schedule: What happens; or how many ranks there are, to which nothing happens, and whose
            requests take 10 ms.
        settings: Of the run's membership.
        store: To go on with; a fresh one if left out.
        sync_timeout: Of the exchanges, in virtual seconds.
        limit: Virtual seconds after which the run counts as stuck.
        most_incarnations: How many incarnations a rank may have.
        chunk_bytes: Of the exchanges, in bytes; their default if left out.
        prepare: Called with each node before it trains.
    """
    schedule = Schedule(schedule, latency=0.01) if isinstance(schedule, int) else schedule
    scheduler = Scheduler()
    outcome = Outcome(store or SimulatedStore())
    done: set[int] = set()
    incarnations = dict.fromkeys(range(schedule.world_size), 0)
    running = dict.fromkeys(range(schedule.world_size), 0)

    def start(rank: int, time: float) -> None:
        if incarnations[rank] < most_incarnations:
            incarnations[rank] += 1
            running[rank] += 1
            incarnation = incarnations[rank]
            scheduler.start_at(time, lambda: run(rank, incarnation))

    def run(rank: int, incarnation: int) -> None:
        chance = random.Random(f"{schedule.seed}/{rank}/{incarnation}")
        connection = Connection(
            outcome.store,
            scheduler,
            rank=rank,
            incarnation=incarnation,
            faults=schedule.faults,
            latency=schedule.latency,
            chance=chance,
            replace=lambda: start(rank, scheduler.now + schedule.restart_after),
        )
        limits = {}
        if isinstance(settings, Fixed):
            limits = {"lost_after": settings.lost_after, "return_within": settings.return_within}
        timing = Timing(
            sync_timeout=sync_timeout,
            **limits,
            clock=connection.clock,
            sleep=connection.sleep,
            repeat=partial(_repeat, scheduler, connection),
            in_background=partial(_in_background, scheduler, connection),
        )
        try:
            exchange = StoreExchange(
                connection,
                rank,
                schedule.world_size,
                None if isinstance(settings, Fixed) else settings,
                timing=timing,
                resume=settings.resume if isinstance(settings, Fixed) else False,
                **({} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}),
            )
            node = Node(rank, incarnation, exchange, connection, chance)
            if prepare is not None:
                prepare(node)
            outcome.results[rank, incarnation] = train(node)
            exchange.leave()
        except BaseException as error:
            outcome.results[rank, incarnation] = error
            if running[rank] == 1 and rank not in done:
                start(rank, scheduler.now + schedule.restart_after)
        else:
            done.add(rank)
        finally:
            running[rank] -= 1

    for rank in range(schedule.world_size):
        start(rank, schedule.starts[rank] if rank < len(schedule.starts) else 0.0)
    in_time = scheduler.run(limit)
    outcome.finished = in_time and done == set(incarnations)
    outcome.seconds = scheduler.now
    return outcome


def _in_background(
    scheduler: Scheduler, connection: Connection, act: Callable[[], object]
) -> Callable[[float | None], bool]:
    """Return what a process does beside its training; see :func:`._timing.in_thread`."""
    over = False

    def body() -> None:
        nonlocal over
        try:
            act()
        finally:
            over = True

    def ended(seconds: float | None) -> bool:
        limit = math.inf if seconds is None else scheduler.now + seconds
        while not over and scheduler.now < limit:
            connection.sleep(0.05)
        return over

    scheduler.start_at(scheduler.now, body)
    return ended


def _repeat(
    scheduler: Scheduler, connection: Connection, seconds: float, act: Callable[[], object]
) -> Callable[[], None]:
    """Return what a process does every so many seconds beside everything else; see
    :class:`._timing.Timing`.
    """
    over = False

    def body() -> None:
        with suppress(Killed):
            connection.sleep(seconds)
            while not over:
                act()
                connection.sleep(seconds)

    def stop() -> None:
        nonlocal over
        over = True

    scheduler.start_at(scheduler.now, body)
    return stop
