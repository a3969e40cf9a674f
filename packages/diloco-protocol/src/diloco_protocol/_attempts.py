"""Attempts of one replica: the process tree of each from start to end, and how they follow.

Failed attempts are started again, and all attempts are counted, across interruptions too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._fields import LARGEST
from ._json import dumps, loads, read_bounded
from ._message import read_report
from ._outcome import FINAL_CODE, Outcome
from ._processes import Process, adopt_orphans, is_shortage, members, read_wait_status, send
from ._spec import LAST_ATTEMPT_VARIABLE, environment, is_reserved
from ._types import Reason

if TYPE_CHECKING:
    from ._outcome import Outcome
    from ._spec import ReplicaSpec


_MOST_BYTES = 4096


class AttemptCounter:
    """Counts the attempts of a replica and those that have failed.

    The counts are kept in a file if they have to outlive this machine. A file that cannot be read
    counts as zero attempts: a replica that starts with too small a number is better than one that
    does not start.

    Args:
        path: The file, which a platform brings back after an interruption. Its folder is made if it
            is missing. None: the counts are only kept in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.started, self.failed = (0, 0) if path is None else _read(path)

    def start(self) -> None:
        """Count one more attempt, which begins now.

        Raises:
            OSError: The counts cannot be written to the file.
        """
        self.started += 1
        self._save()

    def fail(self) -> None:
        """Count the attempt as failed.

        Raises:
            OSError: The counts cannot be written to the file.
        """
        self.failed += 1
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(dumps({"started": self.started, "failed": self.failed}))
        partial.replace(self._path)


def run_attempts(
    spec: ReplicaSpec,
    run: Callable[[ReplicaSpec, bool], Outcome],
    told_to_end: Callable[[], bool],
    counter: AttemptCounter,
    restarts: int | None,
) -> Outcome:
    """Run a replica, and run it again while it fails. Return the outcome of its last attempt.

    An interruption counts as an attempt, but not as a failure, so it uses up no restart. A replica
    that was told to end is not started again, and neither is one whose error is
    final.

    Args:
        spec: The spec of the first attempt; later ones have higher attempt numbers.
        run: Runs one attempt to its end. It is told whether another follows in no case if this one
            fails.
        told_to_end: Says whether a signal to end has come.
        counter: Counts the attempts before this call and those that it starts.
        restarts: How often a failed attempt is started again. None: not here, but perhaps by what
            called this.

    Raises:
        OSError: An attempt cannot be started, or its count cannot be written to the file.
    """
    first = spec.attempt
    while True:
        spec = replace(spec, attempt=first + counter.started)
        counter.start()
        last = restarts is not None and counter.failed >= restarts
        outcome = run(spec, last)
        if outcome.exit_code in {0, FINAL_CODE} or told_to_end():
            return outcome
        counter.fail()
        if restarts is None or last:
            return outcome


def _read(path: Path) -> tuple[int, int]:
    try:
        with path.open("rb") as file:
            data: Any = loads(read_bounded(file, _MOST_BYTES, str(path)).decode(), str(path))
        started, failed = data["started"], data["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    whole = type(started) is int and type(failed) is int
    # Far below the largest attempt number, because the spec's own attempt number is added to it.
    return (started, failed) if whole and 0 <= failed <= started < LARGEST // 2 else (0, 0)


# By name, since Windows lacks most of them, and is refused with a message later.
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_PASSED_ON = ("SIGUSR1", "SIGUSR2")
TIMEOUT_CODE = 124
_LONGEST_SLEEP = 3600.0  # seconds; select does not accept every number


class Signals:
    """Signals as events to wait for, without a race between checking for them and sleeping."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.told_to_end = False
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for name in (*_ENDING, *_PASSED_ON):
            number = signal.Signals[name]
            if name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup was used: the replica inherits that SIGHUP is ignored
            signal.signal(number, self._receive)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _receive(self, received: int, _: object) -> None:
        number = signal.Signals(received)
        self.told_to_end |= number.name in _ENDING
        self.received.append(number)

    def wait(self, seconds: float | None) -> None:
        """Sleep until a signal arrives or the time is up."""
        limit = _LONGEST_SLEEP if seconds is None else min(seconds, _LONGEST_SLEEP)
        ready, _, _ = select.select([self._reader], [], [], limit)
        if ready:
            os.read(self._reader, 4096)


def run_attempt(
    spec: ReplicaSpec, signals: Signals, folder: Path | None = None, *, last: bool = False
) -> Outcome:
    """Run one attempt to its end; no process of it is left afterwards.

    Its working files are in a folder below ``folder``, which is removed. The replica is told if it
    is the ``last`` attempt, after whose failure there is no other.

    Raises:
        OSError: The attempt could not be started.
    """
    adopt_orphans()
    started_at = time.time()
    with tempfile.TemporaryDirectory(prefix=".diloco-runner-", dir=folder) as working:
        report = Path(working).absolute() / "report.json"
        spec_file = report.with_name("spec.json")
        spec_file.write_text(spec.to_json(), encoding="utf-8")
        # Variables that the protocol sets come from the protocol alone: no rendezvous or spec of an
        # enclosing run may reach this one. PYTHONINSPECT would make Python end with 1 instead of
        # the exit code of a SystemExit.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not is_reserved(name) and name != "PYTHONINSPECT"
        }
        told_last = {LAST_ATTEMPT_VARIABLE: "1"} if last else {}
        # Without -P, the entrypoint's process imports from its working directory, too.
        safe_path = ["-P"] if sys.flags.safe_path else []
        child = subprocess.Popen(
            [sys.executable, *safe_path, "-m", "diloco_protocol._child", spec_file, report],
            env={**kept, **environment(spec), **told_last},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        status, reason, first_signal = _watch(child, spec, signals)
        reported = read_report(report)
    return _outcome(status, reason, first_signal, reported, spec, started_at)


def _watch(
    child: subprocess.Popen[bytes], spec: ReplicaSpec, signals: Signals
) -> tuple[int, Reason | None, signal.Signals | None]:
    """Wait for the child, end it if necessary, then end every process that it left behind.

    Return its wait status, why it was ended, and the first signal that was passed on to it. If it
    ended by itself before any signal was sent, there is no reason.
    """
    deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
    kill_at: float | None = None
    status: int | None = None
    reason: Reason | None = None
    first_signal: signal.Signals | None = None
    while True:
        status = _reap(child, status)
        now = time.monotonic()
        try:
            left = members(os.getpid(), child.pid)
        except OSError as error:
            if not is_shortage(error):
                raise
            signals.wait(0.05)  # the next round will know which processes are left
            continue
        if status is not None and not left:
            return status, reason, first_signal
        if signals.received:
            number = signals.received.pop(0)
            if number.name in _PASSED_ON:  # meant for the program; its helpers would die of it
                send([child.pid] if status is None else [], number)
                continue
            if status is None:
                reason, first_signal = reason or Reason.CANCEL_REQUESTED, first_signal or number
            _signal_tree(child.pid, left, number)
            kill_at = now + spec.grace if kill_at is None else kill_at
            continue
        overdue = status is None and deadline is not None and now >= deadline
        if kill_at is None and (status is not None or overdue):
            reason = Reason.TIMEOUT if overdue else reason
            _signal_tree(child.pid, left, signal.SIGTERM)
            kill_at = now + spec.grace
        if kill_at is not None and now >= kill_at:
            _signal_tree(child.pid, left, signal.SIGKILL)
            # A process that forks while it is being killed is found in the next round.
            signals.wait(0.05)
        elif kill_at is not None:
            # The end of a grandchild does not wake this process on every system.
            signals.wait(min(0.05, kill_at - now))
        else:
            signals.wait(None if deadline is None else deadline - now)


def _reap(child: subprocess.Popen[bytes], status: int | None) -> int | None:
    """Reap every dead child, adopted ones too; return our own child's wait status once known."""
    while True:
        try:
            pid, ended_with = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child.pid and status is None:
            status = ended_with
            # Without it, Popen would wait for a later process with the same id.
            child.returncode = os.waitstatus_to_exitcode(ended_with)


def _signal_tree(group: int, left: list[Process], number: signal.Signals) -> None:
    if any(process.group == group for process in left):
        # All at once, so that no process can escape by forking. While the group has members, its
        # number is not given to another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    send([process.pid for process in left if process.group != group], number)


def _outcome(
    status: int,
    reason: Reason | None,
    first_signal: signal.Signals | None,
    report: Outcome | None,
    spec: ReplicaSpec,
    started_at: float,
) -> Outcome:
    code, name = read_wait_status(status)
    outcome = report or Outcome(0)
    error = outcome.error
    times: dict[str, Any] = {
        "started_at": started_at,
        "finished_at": max(started_at, time.time()),  # the clock may have been set back
        "attempt": spec.attempt,
    }
    if reason is Reason.TIMEOUT:
        # This holds even if it then ended cleanly: an attempt that was cut short has not succeeded,
        # and no caller may take it for a success.
        code = code or TIMEOUT_CODE
        error = f"rank {spec.rank} ran longer than its timeout of {spec.timeout:g} s"
    elif code == 0 and first_signal is not None and report is None:
        # Programs save their state and exit with 0 when they are told to end. If that counted as a
        # success, the replica would never be started again.
        code, name = 128 + first_signal, first_signal.name
        error = (
            f"rank {spec.rank} was told to end by {name}, and exited with code 0 before its "
            "entrypoint had returned"
        )
    elif code == outcome.exit_code == 0:
        # It finished its work in spite of a signal: a success that came before the signal took
        # effect stays a success.
        return replace(outcome, **times)
    elif error is None:
        how = f"was ended by {name}" if name else f"exited with code {code}"
        error = f"rank {spec.rank} {how}"
    return replace(
        outcome,
        exit_code=code or outcome.exit_code,  # a reported failure stays one
        signal=name,
        error=error,
        result=None,
        reason=reason or (outcome.reason if outcome.exit_code else Reason.ERROR),
        **times,
    )
