"""One replica as its supervisor sees it: start, watch, stop, sweep, judge, perhaps start again."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from diloco_protocol import BackendError, Reason, ReplicaState, ReplicaStatus
from diloco_protocol.backend import FINAL_CODE, status_to_data

from ._files import create_json, open_own_stream, say, write_json, write_text
from ._logs import Sampler
from ._oom import OomWatch
from ._orders import Order
from ._processes import MARKER, ProcessEntry, ProcessId, marker_of, members, process_table
from ._record import AttemptState, RunRecord, outcome_of, read_state
from ._rundir import ReplicaDir
from ._verdict import LATEST, Stop, verdict

#: Seconds that the runner gets beyond the grace to end its tree and to report, before everything is
#: killed.
MARGIN = 2.0


# Errors of a full disk, or of a lack of file descriptors: the end is then written down later.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})


class Phase(enum.StrEnum):
    """The phase of an attempt, as ``state.json`` has it."""

    STARTING = "starting"
    RUNNING = "running"
    SWEEPING = "sweeping"  # the runner is gone; what it left behind is being ended
    DONE = "done"


@dataclass(eq=False)
class Replica:
    """The state machine of one replica. Used by one thread, that of the supervisor.

    Args:
        directory: Its files.
        marker: The marker that its processes carry in their environment.
        rules: The record of the run: grace, timeout, restarts.
        order: The order to start it; None if this supervisor only finishes what another one began.
        reap: Reads how a child process ended; None if it is not our child or has not ended.
        oom: Evidence of OOM kills.
        strays: Finds, in a table of all processes, those whose replica is not known.
        ended_strays: Counts those that have ended.
        phase: What is done with it now.
        patient: Whether it waits for room on a full disk.
    """

    directory: ReplicaDir
    marker: str
    rules: RunRecord
    order: Order | None
    reap: Callable[[int], int | None]
    oom: OomWatch
    strays: Callable[[Mapping[int, ProcessEntry]], dict[int, ProcessEntry]]
    ended_strays: Callable[[], int] = lambda: 0
    phase: Phase = Phase.STARTING
    patient: bool = True  # waits for room on a full disk
    _attempt: int = 0
    _runner: ProcessId | None = None
    _pid: int = 0  # of the runner; its identity is unknown if it died at once
    _told: set[ProcessId] = field(default_factory=set)
    _known: dict[int, ProcessId] = field(default_factory=dict)
    _started_at: float = 0.0
    _gone_at: float | None = None
    _wait_status: int | None = None
    _stop: Stop | None = None
    _kill_at: float | None = None  # monotonic, from here on
    _deadline: float | None = None
    _popen: subprocess.Popen[bytes] | None = None
    _sampler: Sampler = field(default_factory=Sampler)
    _unwritten: ReplicaStatus | None = None

    @property
    def done(self) -> bool:
        """Say whether the terminal record is written."""
        return self.phase is Phase.DONE

    @property
    def being_ended(self) -> bool:
        """Say whether its processes are being ended, so that it should be looked at often."""
        return self.phase is Phase.SWEEPING or (self._stop is not None and not self.done)

    def is_runner(self, pid: int) -> bool:
        """Say whether ``pid`` is its runner."""
        return self._pid == pid

    def owns(self, process: ProcessId) -> bool:
        """Say whether a process is its runner, or known to be one of its own."""
        known = self._runner, self._known.get(process.pid)
        return process in known or marker_of(process.pid) == self.marker

    def start(self) -> None:
        """Start the next attempt.

        Raises:
            OSError: The operating system refused.
        """
        if self.order is None:
            raise RuntimeError("a supervisor without orders cannot start a replica")
        self._attempt += 1
        self._runner, self._stop, self._kill_at, self._deadline = None, None, None, None
        self._wait_status, self._gone_at = None, None
        self._known, self._told = {}, set()
        files = self.directory.attempt(self._attempt)
        files.path.mkdir(mode=0o700, exist_ok=True)
        write_text(files.spec, replace(self.order.spec, attempt=self._attempt).to_json())
        self.phase = Phase.STARTING
        self._started_at = time.time()
        self._save()
        restarts = "elsewhere" if self._restarts_left else "0"
        arguments = ("--spec", files.spec, "--outcome", files.outcome, "--restarts", restarts)
        with (
            open_own_stream(files.log("stdout"), "ab") as out,
            open_own_stream(files.log("stderr"), "ab") as err,
        ):
            self._popen = subprocess.Popen(
                [*self.order.argv, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self.order.env, MARKER: self.marker},
                cwd=self.order.cwd,
                start_new_session=True,
            )
        self._pid = self._popen.pid
        self.phase = Phase.RUNNING
        try:
            self._runner = ProcessId.of(self._pid)
        except OSError:
            self._popen.kill()  # it could not be told from a later process with its pid
            raise
        self._deadline = self._latest_end()
        self._save()

    @property
    def _restarts_left(self) -> bool:
        return self._attempt <= self.rules.max_restarts

    def _latest_end(self) -> float | None:
        """Return when an attempt that begins now is ended here.

        The runner enforces the timeout, and this is for a runner that cannot.
        """
        if self.rules.timeout is None:
            return None
        return min(time.monotonic() + self.rules.timeout + self.rules.grace + MARGIN, LATEST)

    def give_up(self) -> None:
        """Record that the replica was to be started and could not be."""
        if self._popen is None and self.phase is Phase.STARTING:
            words = "a replica of the run could not be started"
            self._seal(
                ReplicaStatus(ReplicaState.FAILED, reason=Reason.START_FAILED, message=words)
            )

    def adopt(self) -> None:
        """Go on from what another supervisor left on disk, even where little was left."""
        try:
            state = read_state(self.directory.state)
        except BackendError as error:
            # Its processes are also known by their environment, and must be ended all the same.
            say(f"{error}\n")
            identities = (entry.identity for entry in members(self.marker).values())
            state = AttemptState(len(self.directory.attempts()), known=tuple(identities))
        if self.directory.final.exists():
            if not any(process.alive() for process in state.processes):
                self.phase = Phase.DONE
                return
            with noted():  # no supervisor has written this
                self.directory.final.unlink()
        self._attempt, self._runner, self._stop = state.attempt, state.runner, state.stop
        self._pid = 0 if self._runner is None else self._runner.pid
        self._known = {identity.pid: identity for identity in state.known}
        self._started_at = state.started_at or time.time()
        if self._stop is not None:
            self._kill_at = time.monotonic() + self.rules.grace + MARGIN
        if (whole := self._latest_end()) is not None:
            self._deadline = min(whole, whole if state.deadline is None else state.deadline)
        self.phase = Phase.RUNNING

    def cancel_requested(self) -> bool:
        """Say whether a cancel was requested."""
        return self.directory.cancelled_at() is not None

    def stop(self, reason: Reason) -> None:
        """Begin to end the attempt: write that down, send SIGTERM, and SIGKILL after the grace."""
        if self._stop is not None or self.done:
            return
        # So that state.json names the processes that may slip away while they are being ended
        self._members()
        self._stop = Stop(reason, time.time())
        margin = MARGIN if self.phase is Phase.RUNNING else 0.0
        self._kill_at = time.monotonic() + self.rules.grace + margin
        self._save()
        if self.phase is Phase.RUNNING and self._runner is not None:
            # Only the runner gets the signal, and passes it on to its tree: a second SIGTERM means
            # "at once" to many programs.
            self._runner.send(signal.SIGTERM)

    def step(self) -> None:
        """Look once, and do what is due."""
        if self._unwritten is not None and not self.done:
            self._seal(self._unwritten)
            return
        if self.phase is Phase.RUNNING:
            self._watch()
        if self.phase is Phase.SWEEPING:
            self._sweep()

    def sample(self) -> None:
        """Write down the sizes of the logs."""
        if not self.done and self._attempt:
            # Without a sample, lines have later times. That is not logged, since it would be logged
            # twice a second.
            with contextlib.suppress(OSError, BackendError):
                self._sampler.sample(self.directory.attempt(self._attempt))

    def _members(self) -> dict[int, ProcessEntry]:
        known = [*self._known.values(), *([self._runner] if self._runner else [])]
        table = process_table()
        alive = members(self.marker, known, table)
        alive.pop(os.getpid(), None)
        self._known.update({pid: entry.identity for pid, entry in alive.items()})
        return alive | self.strays(table) if self.phase is Phase.SWEEPING else alive

    def _watch(self) -> None:
        if self._runner is None or not self._runner.alive():
            if self._pid:
                self._wait_status = self.reap(self._pid)
            if self._popen is not None:  # reaped here, so Popen must not wait
                self._popen.returncode = self._wait_status or 0
            # If the runner was not waited for, it is not known when it ended.
            self._gone_at = None if self._wait_status is None else time.time()
            self.phase = Phase.SWEEPING
            return
        now = time.monotonic()
        if self._stop is None:
            if self.cancel_requested():
                self.stop(Reason.CANCEL_REQUESTED)
            elif self._deadline is not None and now > self._deadline:
                self.stop(Reason.TIMEOUT)
                self._kill_at = now  # it has had its grace already
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _sweep(self) -> None:
        # Asked twice, since a process that forks while the table is read can be missed. One that
        # forks and ends again and again may be missed twice, but leaves ended strays.
        ended = self.ended_strays()
        alive = self._members() or self._members()
        if not alive and self.ended_strays() == ended:
            self._finish()
            return
        if self._stop is None and self._wait_status is None and self.cancel_requested():
            # Its runner died unseen, and what it left behind still works: the cancel is to end
            # that.
            self.stop(Reason.CANCEL_REQUESTED)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self.rules.grace
            self._save()
        for entry in alive.values():
            if entry.identity not in self._told:
                self._told.add(entry.identity)
                entry.identity.send(signal.SIGTERM)
        if time.monotonic() >= self._kill_at:
            self._kill()

    def _kill(self) -> None:
        for entry in self._members().values():
            entry.identity.send(signal.SIGKILL)

    def _finish(self) -> None:
        files = self.directory.attempt(self._attempt)
        outcome, problem = outcome_of(files) if self._attempt else (None, "")
        killed = outcome.signal == "SIGKILL" if outcome else self._wait_status == signal.SIGKILL
        if self._stop is None and self.cancel_requested() and not self._attempt:
            self._stop = Stop(Reason.CANCEL_REQUESTED, time.time())
        self.sample()
        status = verdict(
            attempt=max(1, self._attempt),
            outcome=outcome,
            wait_status=self._wait_status,
            stop=self._stop,
            problem=problem,
            oom=killed and self._stop is None and self.oom.take(),
            started_at=self._started_at,
            finished_at=self._gone_at,
        )
        again = (
            status.state is ReplicaState.FAILED
            and self.order is not None
            and self._restarts_left
            and status.exit_code != FINAL_CODE
        )
        ordered = (
            None if self._stop is None or self._stop.reason is Reason.TIMEOUT else self._stop.reason
        )
        if again and (ordered or self.cancel_requested()):
            # It failed by itself, but the replica ends because it may not be started again.
            reason = ordered or Reason.CANCEL_REQUESTED
            words = "stopped between two attempts"
            status = replace(status, state=ReplicaState.CANCELLED, reason=reason, message=words)
        elif again:
            try:
                self.start()
            except (OSError, BackendError) as error:
                words = f"could not be started again: {error}"
                number, reason = self._attempt, Reason.START_FAILED
                status = replace(status, attempt=number, reason=reason, message=words)
            else:
                return
        self._seal(status)

    def _seal(self, status: ReplicaStatus) -> None:
        """Write down how it ended; while there is no room, try again at every step."""
        data = status_to_data(status)
        with noted():
            try:
                write_json(self.directory.final, data)
            except (OSError, BackendError) as error:
                if self.patient and getattr(error, "errno", None) in _PASSING:
                    self._unwritten = status
                    return
                create_json(self.directory.final_outside, data)
                raise
        self.phase = Phase.DONE

    def _save(self) -> None:
        state = AttemptState(
            self._attempt, str(self.phase), self._runner, tuple(self._known.values()),
            self._started_at, self._stop, self._deadline,
        )  # fmt: skip
        with noted():
            write_json(self.directory.state, asdict(state))


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Log an error of a file, which must not stop the supervisor.

    A replica may have put something in the place of its files, the disk may be full, or descriptors
    may be lacking.
    """
    try:
        yield
    except (OSError, BackendError) as error:
        say(f"{error}\n")
