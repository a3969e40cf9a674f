"""Telemetry: what a replica tells of itself in the store while it runs.

Nothing decides by it, and training neither waits for it nor fails because of it: the thread that
trains only notes what has happened, and another one writes that. The format is that of
:mod:`diloco_protocol.telemetry`.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

import torch

from diloco_protocol import InvalidRequestError
from diloco_protocol.telemetry import (
    MOST_METRICS,
    MOST_RANKS,
    NAME_CHARACTERS,
    TEXT_CHARACTERS,
    Live,
    Metric,
    Phase,
    SyncLine,
    check_metrics,
    end_key,
    history_seconds,
    live_key,
    live_seconds,
)

from ..__about__ import __version__
from .._errors import ConfigurationError, FencedError, RunExistsError
from .._host import host_name
from .._redact import redact
from .._store._api import Store
from .._timing import Timing
from ._base import Schema
from ._endings import as_text
from ._history import HistoryLines
from ._report import SyncReport

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
_MOST_REPORTS = 4096  # that wait for the thread that writes

_log = logging.getLogger("diloco_core")


@dataclass(slots=True)
class Doing:
    """What a replica does outside of its training. Written by whatever carries out a sync.

    Attributes:
        phase: What it does.
        waits_for: The ranks that it waits for, in order.
    """

    phase: Phase = Phase.IDLE
    waits_for: Sequence[int] = ()

    def now(self, phase: Phase, waits_for: Sequence[int] = ()) -> None:
        """Note what it does from now on."""
        self.phase, self.waits_for = phase, waits_for


class Logged:
    """What the program of a replica has logged. Written by the thread that trains.

    Attributes:
        last: The last value of every metric. It is replaced as a whole.
    """

    def __init__(self) -> None:
        self.last: Mapping[str, Metric] = {}
        self._new: dict[str, Metric] = {}

    def take(self, metrics: Mapping[str, object]) -> None:
        """Take the values of some metrics.

        Raises:
            ConfigurationError: A name or a value is not allowed, or there are too many names.
        """
        try:
            checked = check_metrics({name: _plain(name, metrics[name]) for name in metrics})
        except InvalidRequestError as error:
            raise ConfigurationError(f"log() cannot take this: {error}") from None
        last = {**self.last, **checked}
        if len(last) > MOST_METRICS:
            raise ConfigurationError(
                f"log() takes at most {MOST_METRICS} metrics, and with {sorted(checked)} there are "
                f"{len(last)} names: use the same names every time"
            )
        self.last = last
        self._new.update(checked)

    def since_sync(self) -> dict[str, Metric]:
        """Return what was logged since this was called last."""
        new, self._new = self._new, {}
        return new


def _setup(schema: Schema) -> dict[str, Metric]:
    """Return the versions and settings of a run, as far as a record has room for them."""
    tensors = repr(sorted(schema.tensors.items())).encode()
    setup = {
        "diloco-core": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        # Of the names, shapes and dtypes of its tensors.
        "model": f"sha256:{hashlib.sha256(tensors).hexdigest()[:16]}",
        **schema.settings,
    }
    setup.pop("committed", None)  # which is where the replicas met, and no setting
    names = [name for name in setup if len(name) <= NAME_CHARACTERS][:MOST_METRICS]
    return {name: setup[name][:TEXT_CHARACTERS] for name in names}


def _plain(name: str, value: object) -> object:
    if type(value) in {float, int, bool, str}:  # first, since it is quickest
        return value
    if isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"log({name}=) was given a tensor: pass its number ({name}=....item()). That waits for "
            "the device, so it need not be done at every step"
        )
    if isinstance(value, Integral):  # numbers of numpy, too
        return int(value)
    return float(value) if isinstance(value, Real) else value


class Telemetry:
    """Writes ``live/`` and ``history/`` for one incarnation.

    Args:
        store: The run's prefix. Every request is sent once.
        rank: The rank.
        world_size: The number of ranks.
        run_id: The launch.
        timing: Clock and threads.
        environ: Says who has started this process, and where.
        wall: The time in Unix seconds; replaced in tests.

    Attributes:
        logged: What the program logs.
        steps: Returns the inner steps of the rank. An outer loop sets it, as the following two.
        committed: Returns the outer steps of the run.
        training: Says whether the replica trains at the moment.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        run_id: str,
        timing: Timing,
        environ: Mapping[str, str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._timing, self._wall = store, timing, wall
        attempt = environ.get("DILOCO_ATTEMPT", "")
        self._said = Live(
            run=run_id,
            rank=rank,
            world_size=world_size,
            epoch=0,
            attempt=int(attempt) if attempt.isdecimal() and 0 < len(attempt) < 10 else None,
            host=host_name(),
            backend=environ.get("DILOCO_BACKEND", ""),
            place=environ.get("DILOCO_PLACE", ""),
            time=0.0,
            step=0,
            sync=0,
            phase=Phase.IDLE,
        )
        self.logged = Logged()
        self.steps: Callable[[], int] = lambda: 0
        self.committed: Callable[[], int] = lambda: self._lines.number
        self.training: Callable[[], bool] = bool
        self._doing = Doing()
        self._lines = HistoryLines(rank, 0)
        self._reports: deque[tuple[float, SyncReport, dict[str, Metric]]] = deque()
        self._lost = 0  # reports for which there was no room
        self._trained = self._exposed = 0.0
        self._mark = 0, 0.0, -1  # inner steps, when they were taken, lines at that time
        self._steps_at_sync: int | None = None
        self._began = self._live_at = self._history_at = 0.0
        self._writing = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._fails = False

    def begin(self, epoch: int, doing: Doing, schema: Schema) -> None:
        """Write from now on.

        Args:
            epoch: The incarnation.
            doing: What it does.
            schema: What is trained, and how.
        """
        self._said = replace(self._said, epoch=epoch, setup=_setup(schema))
        self._doing = doing
        self._lines = HistoryLines(self._said.rank, epoch)
        self._began = self._live_at = self._history_at = self._timing.clock()
        self._stop = self._timing.repeat(_LOOK_SECONDS, self._look)

    def synced(self, report: SyncReport) -> None:
        """Note the report of a sync."""
        if len(self._reports) >= _MOST_REPORTS:
            self._lost += 1
        else:
            self._reports.append((self._wall(), report, self.logged.since_sync()))

    def end(self, error: BaseException | None = None) -> None:
        """Write what is left, for a few seconds at most; repeatable.

        Args:
            error: Why the replica has failed; None if it has left.
        """
        stop, self._stop = self._stop, None
        if stop is None:
            return

        def act() -> None:
            stop()
            # Where another run has the prefix by now, what is there belongs to that.
            if not isinstance(error, RunExistsError) and self._writing.acquire(blocking=False):
                self._finish(error)

        self._timing.in_background(act)(_END_SECONDS)

    def _finish(self, error: BaseException | None) -> None:
        self._attempt(self._take_reports)
        self._attempt(lambda: self._note(error, is_over=True))
        said = self._said
        # The next incarnation replaces the live record, and leaves this one alone.
        self._attempt(lambda: self._put(end_key(said.rank, said.epoch), said.to_bytes()))
        if not isinstance(error, FencedError):  # or it belongs to a newer incarnation
            self._attempt(lambda: self._put(live_key(said.rank), said.to_bytes()))
        while self._lines.newest() is not None and self._attempt(self._put_history):
            pass

    def _look(self) -> None:
        """Write what is due."""
        with self._writing:
            now, ranks = self._timing.clock(), self._said.world_size
            self._attempt(self._take_reports)
            if now >= self._live_at:
                # Replicas that begin together do not write together for ever.
                turn = self._said.rank / ranks if self._live_at == self._began else 0.0
                self._live_at = now + live_seconds(ranks) * (1 + turn)
                self._attempt(self._put_live)
            if now >= self._history_at and self._lines.newest() is not None:
                self._history_at = now + history_seconds(ranks)
                self._attempt(self._put_history)

    def _attempt(self, act: Callable[[], object]) -> bool:
        """Do something, and say whether that was possible; whatever fails here stops no replica."""
        try:
            act()
        except Exception as error:  # noqa: BLE001
            if not self._fails:
                _log.warning(
                    "rank %d: what this replica tells of itself (telemetry) cannot be written, and "
                    "it goes on without: %s",
                    self._said.rank,
                    error,
                )
            self._fails = True
            return False
        return True

    def _put(self, key: str, data: bytes) -> None:
        self._store.put(key, [data])
        self._fails = False

    def _put_live(self) -> None:
        self._note()
        self._put(live_key(self._said.rank), self._said.to_bytes())

    def _note(self, error: BaseException | None = None, *, is_over: bool = False) -> None:
        ended = ("left" if error is None else "failed") if is_over else None
        phase = Phase.TRAINING if self.training() else self._doing.phase
        phase = Phase.IDLE if is_over else phase
        waits_for = tuple(self._doing.waits_for) if phase is Phase.WAITING else ()
        step = self.steps()
        self._measure(step, training=phase is Phase.TRAINING)
        requests = self._store.requests
        self._said = replace(
            self._said,
            time=self._wall(),
            step=step,
            sync=self.committed(),
            phase=phase,
            waits_for=waits_for[:MOST_RANKS],
            missing=len(waits_for),
            writes=None if requests is None else requests.writes,
            reads=None if requests is None else requests.reads,
            dropped=self._lines.dropped + self._lost,
            ended=ended,
            error="" if error is None else redact(as_text(error)),
            metrics=self.logged.last,
        )

    def _measure(self, step: int, *, training: bool) -> None:
        """Note how long a step takes, if no sync was over since the last look."""
        now, lines = self._timing.clock(), self._lines.number
        before, since, lines_then = self._mark
        if lines_then == lines and training and step == before:
            return  # a step may take longer than it is to the next look
        if lines_then == lines and training and step > before:
            seconds = (now - since) / (step - before)
            self._said = replace(self._said, seconds_per_step=seconds)
        self._mark = step, now, lines if training else -1

    def _put_history(self) -> None:
        newest = self._lines.newest()
        if newest is not None:
            self._put(newest.key, newest.data)
            self._lines.written(newest.key, self._timing.clock() - self._began)
            if newest.former:
                self._store.delete([newest.former])

    def _take_reports(self) -> None:
        while self._reports:
            wall, report, metrics = self._reports.popleft()
            trained = max(0.0, report.compute_seconds)  # as in line_of
            self._trained += trained
            self._exposed += max(0.0, report.exposed_seconds)
            before, self._steps_at_sync = self._steps_at_sync, report.total_inner_steps
            steps = 0
            if before is not None:
                steps = report.total_inner_steps - before - report.batches_to_skip
            known, both = self._said, self._trained + self._exposed
            self._said = replace(
                known,
                bytes_sent=known.bytes_sent + report.bytes_sent,
                bytes_received=known.bytes_received + report.bytes_received,
                training_share=self._trained / both if both else None,
                seconds_per_step=(trained / steps if steps > 0 else known.seconds_per_step),
            )
            line = line_of(report, self._lines.number + 1, wall, known, metrics)
            self._lines.add(line.to_bytes(), self._timing.clock() - self._began)


def line_of(
    report: SyncReport, number: int, wall: float, live: Live, metrics: Mapping[str, Metric]
) -> SyncLine:
    """Return the line for a sync.

    Args:
        report: Its report.
        number: Its number among those of the incarnation.
        wall: When it was over, in Unix seconds.
        live: What is known of the replica.
        metrics: What was logged since the sync before.
    """
    values = {each.name: getattr(report, each.name) for each in fields(report)}
    # The clock of a replica may be set back, and no line has a negative time.
    seconds = {name: max(0.0, values[name]) for name in values if name.endswith("_seconds")}
    rates = report.outer_lr if isinstance(report.outer_lr, tuple) else (report.outer_lr,)
    few = report.members <= MOST_RANKS
    values |= {
        **seconds,
        "outer_lr": tuple(rate for rate in rates if rate is not None),
        "weights": report.weights if few else (),
        "clipped": tuple(each.least for each in report.clipped) if few else (),
    }
    return SyncLine(
        number=number, time=wall, attempt=live.attempt, host=live.host, metrics=metrics, **values
    )
