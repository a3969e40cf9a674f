"""Runs one replica in any container or process: ``python -m diloco_protocol.runner --spec FILE --outcome FILE``.

The runner starts the entrypoint in a child with a process group of its own, enforces the timeout, passes signals on,
reaps orphans (as PID 1 must), ends the whole tree within the grace and reports an :class:`Outcome`. Python as PID 1
ignores SIGTERM unless it is handled, so the handlers are installed before anything else.

Without ``--spec`` the spec is taken from the environment (:func:`diloco_protocol.spec_to_environment`). The runner exits
with the replica's own exit code, 128 + n if signal n ended it, and 2 if it could not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._errors import DilocoError
from ._outcome import Outcome
from ._processes import adopt_orphans, descendants, send
from ._spec import ReplicaSpec, environment, spec_from_environment
from ._types import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
START_FAILED_CODE = 2


class _Signals:
    """Signals as events to wait for, with no race between looking and sleeping."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _PASSED_ON:
            signal.signal(number, lambda received, _: self.received.append(signal.Signals(received)))
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wait(self, seconds: float | None) -> None:
        """Sleep until a signal arrives or the time is up."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)


def run(spec: ReplicaSpec, signals: _Signals, folder: Path | None = None) -> Outcome:
    """Run one attempt to its end; nothing of it is left afterwards. Its working files are below ``folder``."""
    adopt_orphans()
    started_at = time.time()
    with tempfile.TemporaryDirectory(prefix=".diloco-runner-", dir=folder) as working:
        report = Path(working) / "report.json"
        spec_file = Path(working) / "spec.json"
        spec_file.write_text(spec.to_json(), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, "-m", "diloco_protocol._child", str(spec_file), str(report)],
            env={**os.environ, **environment(spec)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        status, reason = _watch(child, spec, signals)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return _outcome(status, reason, found, spec, started_at)


def _watch(child: subprocess.Popen[bytes], spec: ReplicaSpec, signals: _Signals) -> tuple[int, Reason | None]:
    """Wait for the child, end it if need be, then end whatever it left behind. Returns its wait status, and why it was ended."""
    deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
    kill_at: float | None = None
    status: int | None = None
    reason: Reason | None = None
    while True:
        status = _reap(child, status)
        now = time.monotonic()
        left = descendants(os.getpid())
        if status is not None and not left:
            return status, reason
        if signals.received:
            number = signals.received.pop(0)
            reason = reason or Reason.CANCEL_REQUESTED
            _signal_tree(child, status, left, number)
            kill_at = now + spec.grace if kill_at is None else kill_at
            continue
        if kill_at is None and (status is not None or (deadline is not None and now >= deadline)):
            if status is None:
                reason = Reason.TIMEOUT
            _signal_tree(child, status, left, signal.SIGTERM)
            kill_at = now + spec.grace
        if kill_at is not None and now >= kill_at:
            _signal_tree(child, status, left, signal.SIGKILL)
            signals.wait(0.05)  # a process that forks while it is being killed is found in the next round
        else:
            signals.wait(_until(now, kill_at, deadline, polling=status is not None))


def _until(now: float, kill_at: float | None, deadline: float | None, *, polling: bool) -> float | None:
    """Seconds to sleep: the end of a child wakes us, that of a grandchild without a subreaper does not."""
    limit = kill_at if kill_at is not None else deadline
    seconds = None if limit is None else max(0.0, limit - now)
    if polling or kill_at is not None:
        return min(0.05, 0.05 if seconds is None else seconds)
    return seconds


def _reap(child: subprocess.Popen[bytes], status: int | None) -> int | None:
    """Reap every dead child, adopted ones too; returns the wait status of ours once it is known."""
    while True:
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child.pid:
            status = found
            child.returncode = os.waitstatus_to_exitcode(found)  # or Popen would wait for somebody else's process


def _signal_tree(child: subprocess.Popen[bytes], status: int | None, left: list[int], number: signal.Signals) -> None:
    if status is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
    # What has left the group, or outlived its leader, is told one by one.
    outside = [pid for pid in left if status is not None or not _in_group(pid, child.pid)]
    send(outside, number)


def _in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return True


def _outcome(
    status: int, reason: Reason | None, found: dict[str, Any], spec: ReplicaSpec, started_at: float
) -> Outcome:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = 128 + number if number is not None else os.WEXITSTATUS(status)
    name = None if number is None else _signal_name(number)
    error = found.get("error")
    if code == 0:
        # It finished its work in spite of the signal or the deadline: a success that won the race stays one.
        return Outcome(
            0, result=found.get("result"), reason=Reason.COMPLETED, started_at=started_at, finished_at=time.time()
        )
    if reason is Reason.TIMEOUT:
        error = f"rank {spec.rank} ran longer than its timeout of {spec.timeout:g} s"
    elif error is None:
        error = f"rank {spec.rank} was ended by {name}" if name else f"rank {spec.rank} exited with code {code}"
    default = Reason.START_FAILED if found.get("start_failed") else Reason.ERROR
    return Outcome(
        code,
        signal=name,
        error=error,
        error_type=found.get("error_type"),
        traceback=found.get("traceback"),
        reason=reason or default,
        started_at=started_at,
        finished_at=time.time(),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write an outcome in one step: a reader sees all of it or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(outcome.to_json(), encoding="utf-8")
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the replica's exit code."""
    if os.name != "posix":
        raise SystemExit("diloco runs on Linux and macOS; on Windows use WSL")
    signals = _Signals()
    parser = argparse.ArgumentParser(prog="python -m diloco_protocol.runner", description="Run one replica.")
    parser.add_argument("--spec", type=Path, help="file with the replica's spec; default: from the environment")
    parser.add_argument("--outcome", type=Path, help="file to write the outcome to")
    arguments = parser.parse_args(argv)
    try:
        if arguments.spec is None:
            spec = spec_from_environment(os.environ)
        else:
            spec = ReplicaSpec.from_json(arguments.spec.read_text(encoding="utf-8"))
    except (DilocoError, OSError) as error:
        outcome = Outcome(
            START_FAILED_CODE, error=str(error), error_type=type(error).__name__, reason=Reason.START_FAILED
        )
    else:
        outcome = run(spec, signals, None if arguments.outcome is None else arguments.outcome.parent)
    if arguments.outcome is not None:
        write_outcome(outcome, arguments.outcome)
    if outcome.error is not None:
        print(f"diloco: {outcome.error}", file=sys.stderr, flush=True)  # noqa: T201 - stderr is the replica's log
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
