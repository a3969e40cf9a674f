"""How long an exchange waits, and how it spends the time."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ._checks import check_positive
from ._errors import ConfigurationError
from ._retry import NOTICE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WATCH_EVERY = 8
"""Every how many syncs a life of an elastic run sees to it that its claim and the manifest are still there.

Each is one small request, with which the planner reckons too.
"""

_STOP_SECONDS = 5.0

_log = logging.getLogger("diloco_core")


def repeat_in_thread(seconds: float, act: Callable[[], object]) -> Callable[[], None]:
    """Call ``act`` every so many seconds from a daemon thread, until what is returned is called, which waits for its end."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = threading.Thread(target=run, name="diloco-repeat", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        # It may be waiting for a store that is away, which nobody else has to wait for.
        thread.join(_STOP_SECONDS)

    return stop


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of an exchange, in seconds.

    Attributes:
        join_timeout: How long to wait for all ranks at the start; in elastic runs, for somebody to begin the run, or to show
            that it still uploads the initial state.
        sync_timeout: How long to wait for the others in one sync.
        beat_interval: How often a replica shows that it lives.
        lost_after: A replica whose beat has not changed for this long, by the observer's own clock, counts as lost.
        clock: Monotonic clock; injected in tests.
        sleep: Injected in tests.
        repeat: Calls something every so many seconds, beside everything else, until what it returns is called; injected in
            tests.
    """

    join_timeout: float = 1800.0
    sync_timeout: float = 1800.0
    beat_interval: float = 10.0
    lost_after: float = 90.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    repeat: Callable[[float, Callable[[], object]], Callable[[], None]] = field(
        default=repeat_in_thread, repr=False
    )

    def __post_init__(self) -> None:
        for name in ("join_timeout", "sync_timeout", "beat_interval", "lost_after"):
            check_positive(name, getattr(self, name), " of seconds")
        if self.lost_after < 2 * self.beat_interval:
            raise ConfigurationError(
                f"lost_after ({self.lost_after} s) must be at least twice beat_interval ({self.beat_interval} s), "
                "or replicas that live would count as lost"
            )


class Moment(NamedTuple):
    """Where a wait stands.

    Attributes:
        elapsed: Seconds since it began.
        look: Whether it is time to look around.
        expired: Whether it has lasted as long as it may.
        now: The same by its clock.
    """

    elapsed: float
    look: bool
    expired: bool
    now: float


class Wait:
    """One wait for others: polls quickly at first, then ever more slowly, and looks around from time to time.

    A pause lasts a twentieth of the wait so far, within limits: what arrives is noticed at most 5 % late.

    Args:
        timing: Clock and sleep.
        near: Whether asking costs microseconds; otherwise milliseconds.
        timeout: Seconds after which the wait ends.
        look_around: Called from time to time; raises where there is no use in waiting any longer.
        expired: Makes the error for a wait that ends.
        alarms: Seconds since the start at which to look around in any case.
        downtime: Seconds so far in which the store could not be reached. They do not count as waiting for others.
        notice: Makes what the log says (level warning) once a minute while the wait lasts; nothing where it is empty. It is
            given the seconds since the wait began.
        notice_after: Seconds until that is said for the first time.
    """

    def __init__(
        self,
        timing: Timing,
        near: bool,
        timeout: float,
        look_around: Callable[[], None],
        expired: Callable[[], Exception],
        alarms: Iterable[float] = (),
        downtime: Callable[[], float] = lambda: 0.0,
        notice: Callable[[float], str] = lambda _: "",
        notice_after: float = NOTICE_SECONDS,
    ) -> None:
        self._timing = timing
        self._downtime = downtime
        self._shortest, self._longest = (0.0002, 0.02) if near else (0.05, 2.0)
        self._look_every = 0.25 if near else 5.0
        self._look_around = look_around
        self._expired = expired
        self._timeout = timeout
        self._start = self._now()
        self._deadline = self._start + timeout
        self._looked = self._start
        self._notice = notice
        self._notice_at = self._start + notice_after
        self._alarms = sorted(self._start + alarm for alarm in alarms)

    def pause(self) -> None:
        """Sleep once. Calls ``look_around`` when it is time to, and raises what ``expired`` returns past the deadline."""
        moment = self.moment()
        if moment.look:
            self._look_around()
        if moment.expired:
            raise self._expired()
        self.sleep(moment)

    def moment(self) -> Moment:
        """Where it stands now, for who decides by himself what to do then; :meth:`sleep` comes next.

        That it is time to look around is said once.
        """
        now = self._now()
        rang = bool(self._alarms) and now >= self._alarms[0]
        look = rang or now - self._looked >= self._look_every
        if look:
            self._alarms = [alarm for alarm in self._alarms if alarm > now]
            self._looked = now
        return Moment(now - self._start, look, now >= self._deadline, now)

    def sleep(self, moment: Moment) -> None:
        """Say what is to be said of the wait at this moment, and sleep once."""
        now = moment.now
        if now >= self._notice_at:
            self._notice_at = now + NOTICE_SECONDS
            if text := self._notice(moment.elapsed):
                _log.warning("%s", text)
        pause = min(max(self._shortest, moment.elapsed / 20), self._longest)
        self._timing.sleep(
            min(pause, *(alarm - now for alarm in self._alarms), self._deadline - now)
        )

    def extend(self) -> None:
        """What is waited for goes on: the wait ends as much later as it may last altogether."""
        self._deadline = self._now() + self._timeout

    def _now(self) -> float:
        return self._timing.clock() - self._downtime()

    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return self._now() - self._start
