"""How long an exchange waits for others, and how often it checks meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from ._checks import check_positive
from ._errors import ConfigurationError
from ._retry import NOTICE_SECONDS

WATCH_EVERY = 8
"""Once in so many syncs, replicas check what has to stay in the store while a run goes on.

Each incarnation checks its claim, the manifest and its copy. Each check is one small request. The
planner counts these requests too.
"""

_STOP_SECONDS = 5.0

_log = logging.getLogger("diloco_core")


def repeat_in_thread(seconds: float, act: Callable[[], object]) -> Callable[[], None]:
    """Call ``act`` every so many seconds from a daemon thread.

    Returns a function that stops the thread and waits for it.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            act()

    thread = threading.Thread(target=run, name="diloco-repeat", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        # Not without a limit: the thread may be waiting for a store that is unavailable.
        thread.join(_STOP_SECONDS)

    return stop


def in_thread(act: Callable[[], object]) -> Callable[[float | None], bool]:
    """Call ``act`` in a thread of its own.

    Returns:
        A function that waits for its end, for so many seconds at most (None: as long as it takes),
        and returns whether it has ended.
    """
    # A daemon: a process whose user gives up must not hang at its end because a store does not
    # answer.
    thread = threading.Thread(target=act, name="diloco-sync", daemon=True)
    thread.start()

    def ended(seconds: float | None) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    return ended


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of an exchange, in seconds.

    Attributes:
        join_timeout: How long to wait for all ranks at the start. In elastic runs: for a replica to
            begin the run, or to show that it is still uploading the initial state.
        sync_timeout: How long to wait for the others in one sync.
        beat_interval: Time between two signs of life of a replica.
        lost_after: A replica whose sign of life has not changed for this long, by the observer's
            clock, counts as lost. In fixed runs, a replica that was given a longer
            ``beat_interval`` counts as lost after twice that at the earliest.
        return_within: With fixed membership: how long the others wait for a rank that is lost, or
            has failed, to be started again. 0: not at all.
        clock: A monotonic clock; replaced in tests.
        sleep: Waits for a number of seconds; replaced in tests.
        repeat: Calls a function every so many seconds in the background, and returns a function
            that ends this; replaced in tests.
        in_background: Calls a function in the background, and returns a function that waits for its
            end; see :func:`in_thread`. Replaced in tests.
    """

    join_timeout: float = 1800.0
    sync_timeout: float = 1800.0
    beat_interval: float = 10.0
    lost_after: float = 90.0
    return_within: float = 300.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    repeat: Callable[[float, Callable[[], object]], Callable[[], None]] = field(
        default=repeat_in_thread, repr=False
    )
    in_background: Callable[[Callable[[], object]], Callable[[float | None], bool]] = field(
        default=in_thread, repr=False
    )

    def __post_init__(self) -> None:
        for name in ("join_timeout", "sync_timeout", "beat_interval", "lost_after"):
            check_positive(name, getattr(self, name), " of seconds")
        if self.return_within != 0:
            check_positive("return_within", self.return_within, " of seconds, or 0")
        if self.lost_after < 2 * self.beat_interval:
            raise ConfigurationError(
                f"lost_after must be at least twice beat_interval ({self.beat_interval:g} s), but "
                f"it is {self.lost_after:g} s (90 s if left out): replicas that are alive would "
                "count as lost. Pass a larger lost_after, or a smaller beat_interval"
            )


def limits_of(timing: Timing) -> dict[str, float]:
    """The limits in seconds by name, without the clock."""
    names = ("join_timeout", "sync_timeout", "beat_interval", "lost_after", "return_within")
    return {name: getattr(timing, name) for name in names}


def limits_given(timing: Timing) -> dict[str, float]:
    """Return the limits that are not the defaults."""
    return dict(limits_of(timing).items() - limits_of(Timing()).items())


class Moment(NamedTuple):
    """The state of a wait at one moment.

    Attributes:
        elapsed: Seconds since the wait began.
        look: Whether it is time to look around.
        expired: Whether the wait has reached its timeout.
        now: The moment by the clock of the wait.
    """

    elapsed: float
    look: bool
    expired: bool
    now: float


@dataclass(eq=False)
class Wait:
    """One wait for other replicas, which polls quickly at first, then more and more slowly.

    It also looks around from time to time. A pause lasts a twentieth of the wait so far, within
    limits, so an arrival is noticed at most 5 % late.

    Args:
        timing: Clock and sleep.
        near: Whether a request to the store takes microseconds; otherwise it takes milliseconds.
        timeout: Seconds after which the wait ends.
        look_around: Called from time to time; raises an error if waiting any longer is of no use.
        expired: Makes the error that is raised at the timeout.
        alarms: Seconds after the start at which to look around in any case.
        downtime: Returns the seconds so far in which the store could not be reached. They do not
            count as waiting for others.
        notice: Makes the message that is logged (level warning) once a minute while the wait lasts,
            given the seconds since it began. An empty message is not logged.
        notice_after: Seconds until the first such message.
    """

    timing: Timing
    near: InitVar[bool]
    timeout: float
    look_around: Callable[[], None]
    expired: Callable[[], Exception]
    alarms: InitVar[Iterable[float]] = ()
    downtime: Callable[[], float] = lambda: 0.0
    notice: Callable[[float], str] = lambda _: ""
    notice_after: InitVar[float] = NOTICE_SECONDS

    def __post_init__(self, near: bool, alarms: Iterable[float], notice_after: float) -> None:
        self._shortest, self._longest = (0.0002, 0.02) if near else (0.05, 2.0)
        self._look_every = 0.25 if near else 5.0
        self._start = self._now()
        self._deadline = self._start + self.timeout
        self._overdue = False
        self._looked = self._start
        self._notice_at = self._start + notice_after
        self._alarms = sorted(self._start + alarm for alarm in alarms)

    def pause(self) -> None:
        """Sleep once.

        Calls ``look_around`` when that is due; past the deadline, raises the error of ``expired``.

        The first pause past the deadline only looks around, so that the caller checks once more
        whether it has to wait: if this process stood still, everything may have arrived by now.
        """
        moment = self.moment()
        if moment.expired and self._overdue:
            raise self.expired()
        self._overdue = moment.expired
        if moment.look or moment.expired:
            self.look_around()
        self.sleep(moment)

    def moment(self) -> Moment:
        """Return the state of the wait now, for callers that decide for themselves what to do.

        They call :meth:`sleep` next. Each time to look around is reported once.
        """
        now = self._now()
        rang = bool(self._alarms) and now >= self._alarms[0]
        look = rang or now - self._looked >= self._look_every
        if look:
            self._alarms = [alarm for alarm in self._alarms if alarm > now]
            self._looked = now
        return Moment(now - self._start, look, now >= self._deadline, now)

    def sleep(self, moment: Moment) -> None:
        """Log a notice if one is due at this moment, and sleep once."""
        now = moment.now
        if now >= self._notice_at:
            self._notice_at = now + NOTICE_SECONDS
            if text := self.notice(moment.elapsed):
                _log.warning("%s", text)
        pause = min(max(self._shortest, moment.elapsed / 20), self._longest)
        left = min(pause, *(alarm - now for alarm in self._alarms), self._deadline - now)
        # Past the deadline too, where the caller has found something to do in the last moment.
        self.timing.sleep(max(0.0, left))

    def extend(self) -> None:
        """There is progress: the whole timeout starts again from now."""
        self._deadline = self._now() + self.timeout

    def _now(self) -> float:
        return self.timing.clock() - self.downtime()

    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return self._now() - self._start
