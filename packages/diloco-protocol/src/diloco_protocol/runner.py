"""Runs one replica in any container or process: ``python -m diloco_protocol.runner --spec FILE --outcome FILE``.

The runner starts the entrypoint in a child with a process group of its own, enforces the timeout, passes signals on,
reaps orphans (as PID 1 must), ends the whole tree within the grace and reports an :class:`Outcome`. Python as PID 1
ignores SIGTERM unless it is handled, so the handlers are installed before anything else.

Without ``--spec`` the spec is taken from ``--spec-strings``, a file with the variables of
:func:`diloco_protocol.spec_to_environment` as a JSON object, or from the arguments
(:func:`diloco_protocol.spec_to_arguments`), or else from the environment. Where one template serves a whole cohort, ``--index``
is added to the spec's rank and every ``--failed`` to its attempt. ``--message`` and ``--failure`` are for channels of a few KiB
(:func:`diloco_protocol.outcome_to_message`). With ``--restarts`` a failed attempt is started again in
place, for platforms that start nothing again. ``--attempts`` counts attempts in a file, for platforms that bring it back after
an interruption.

The runner exits with the replica's own exit code, with three exceptions. If signal
n ended the replica, or was sent to it and it exited with 0 before its entrypoint had returned, the code is 128 + n. If it
exited with 0 only after its timeout, the code is 124. If the replica could not be started, the code is 2.
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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._attempts import AttemptCounter, run_attempts
from ._errors import DilocoError, InvalidRequestError
from ._json import dumps, loads
from ._message import (
    LEAST_MESSAGE_BYTES,
    MESSAGE_BYTES,
    STARTED_MESSAGE,
    outcome_to_message,
)
from ._outcome import Outcome
from ._processes import Process, adopt_orphans, members, send
from ._signals import read_wait_status
from ._spec import ReplicaSpec, environment, spec_from_arguments, spec_from_environment
from ._types import Reason
from ._variable_strings import variables_from_strings
from ._variables import is_reserved

if TYPE_CHECKING:
    from collections.abc import Sequence

# By name, since Windows, which is to be refused with a sentence, lacks most of them.
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_PASSED_ON = ("SIGUSR1", "SIGUSR2")
START_FAILED_CODE = 2
TIMEOUT_CODE = 124
_LONGEST_SLEEP = 3600.0  # seconds; select takes no arbitrary number


class _Signals:
    """Signals as events to wait for, with no race between looking and sleeping."""

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
                continue  # nohup: the replica inherits that it is ignored
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


def run(spec: ReplicaSpec, signals: _Signals, folder: Path | None = None) -> Outcome:
    """Run one attempt to its end; nothing of it is left afterwards. Its working files are below ``folder``.

    Raises:
        OSError: It could not be started.
    """
    adopt_orphans()
    started_at = time.time()
    with tempfile.TemporaryDirectory(prefix=".diloco-runner-", dir=folder) as working:
        report = Path(working).absolute() / "report.json"
        spec_file = report.with_name("spec.json")
        spec_file.write_text(spec.to_json(), encoding="utf-8")
        # What the protocol sets, nobody else sets: no rendezvous or spec of a run around this one shines through.
        kept = {name: value for name, value in os.environ.items() if not is_reserved(name)}
        child = subprocess.Popen(
            [
                sys.executable,
                *_safe_path(),
                "-m",
                "diloco_protocol._child",
                str(spec_file),
                str(report),
            ],
            env={**kept, **environment(spec)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        status, reason, told = _watch(child, spec, signals)
        report_fields: dict[str, Any] = (
            json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        )
    return _outcome(status, reason, told, report_fields, spec, started_at)


def _safe_path() -> list[str]:
    """If the runner was kept from importing what lies in its working directory, so is the entrypoint's process."""
    return ["-P"] if sys.flags.safe_path else []


def _watch(
    child: subprocess.Popen[bytes], spec: ReplicaSpec, signals: _Signals
) -> tuple[int, Reason | None, signal.Signals | None]:
    """Wait for the child, end it if need be, then end whatever it left behind.

    Returns its wait status, why it was ended, and the first signal that was passed on to it. If it ended by itself before
    any signal was sent, there is no reason.
    """
    deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
    kill_at: float | None = None
    status: int | None = None
    reason: Reason | None = None
    told: signal.Signals | None = None
    while True:
        status = _reap(child, status)
        now = time.monotonic()
        left = members(os.getpid(), child.pid)
        if status is not None and not left:
            return status, reason, told
        if signals.received:
            number = signals.received.pop(0)
            if number.name in _PASSED_ON:  # a word to the program, whose helpers would die of it
                send([child.pid] if status is None else [], number)
                continue
            if status is None:
                reason, told = reason or Reason.CANCEL_REQUESTED, told or number
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
            signals.wait(
                0.05
            )  # a process that forks while it is being killed is found in the next round
        elif kill_at is not None:
            signals.wait(
                min(0.05, kill_at - now)
            )  # the end of a grandchild does not wake us everywhere
        else:
            signals.wait(None if deadline is None else deadline - now)


def _reap(child: subprocess.Popen[bytes], status: int | None) -> int | None:
    """Reap every dead child, adopted ones too; returns the wait status of ours once it is known."""
    while True:
        try:
            pid, ended_with = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child.pid and status is None:
            status = ended_with
            child.returncode = os.waitstatus_to_exitcode(
                ended_with
            )  # or Popen would wait for somebody else's process


def _signal_tree(group: int, left: list[Process], number: signal.Signals) -> None:
    if any(process.group == group for process in left):
        # At once, so that none can fork its way out. While the group has members its number is not given to another.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    send([process.pid for process in left if process.group != group], number)


def _outcome(
    status: int,
    reason: Reason | None,
    told: signal.Signals | None,
    report: dict[str, Any],
    spec: ReplicaSpec,
    started_at: float,
) -> Outcome:
    code, name = read_wait_status(status)
    finished_at = time.time()
    error = report.get("error")
    if reason is Reason.TIMEOUT:
        # Also if it then ended in good order: what was cut short has not succeeded, and no caller may take it for a success.
        code = code or TIMEOUT_CODE
        error = f"rank {spec.rank} ran longer than its timeout of {spec.timeout:g} s"
    elif code == 0 and told is not None and "result" not in report:
        # Programs save and leave with 0 when they are told to end. Taken for a success, it would never be started again.
        code, name = 128 + told, told.name
        error = f"rank {spec.rank} was told to end by {name}, and exited with code 0 before its entrypoint had returned"
    elif code == 0:
        # It finished its work in spite of a signal: a success that won the race stays one.
        result = report.get("result")
        return Outcome(
            0,
            result=result,
            reason=Reason.COMPLETED,
            started_at=started_at,
            finished_at=finished_at,
            attempt=spec.attempt,
        )
    elif error is None:
        error = (
            f"rank {spec.rank} was ended by {name}"
            if name
            else f"rank {spec.rank} exited with code {code}"
        )
    default = Reason.START_FAILED if report.get("start_failed") else Reason.ERROR
    return Outcome(
        code,
        signal=name,
        error=error,
        error_type=report.get("error_type"),
        traceback=report.get("traceback"),
        reason=reason or default,
        started_at=started_at,
        finished_at=finished_at,
        attempt=spec.attempt,
    )


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write an outcome in one step: a reader sees all of it or nothing.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(outcome.to_json())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _write_message(outcome: Outcome, path: Path, size: int) -> Outcome:
    """Report through a file that is written in place (in a container it is a mount), and log lines; returns what was reported.

    Raises:
        OSError: It cannot be written.
    """
    try:
        text, lines = outcome_to_message(outcome, size)
    except InvalidRequestError as error:
        outcome = _invalid_result(outcome, str(error))
        text, lines = outcome_to_message(outcome, size)
    for line in lines:
        print(line, flush=True)  # noqa: T201 - stdout is the replica's log
    _overwrite(path, text)
    return outcome


def _overwrite(path: Path, text: str) -> None:
    """Write a file in place, so that it is empty at no moment."""
    data = text.encode()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        file.truncate(len(data))


def _limited(outcome: Outcome, most: int | None) -> Outcome:
    """An outcome whose result is at most so many bytes of JSON; a larger one is a failure that says so."""
    if most is None or outcome.result is None or (size := len(dumps(outcome.result))) <= most:
        return outcome
    return _invalid_result(
        outcome,
        f"the result is {size} bytes of JSON; this backend carries up to {most}: write it to the rendezvous and return its name",
    )


def _invalid_result(outcome: Outcome, error: str) -> Outcome:
    return replace(
        outcome,
        exit_code=1,
        result=None,
        error=error,
        error_type="InvalidResult",
        reason=Reason.ERROR,
    )


def _read_spec(arguments: argparse.Namespace) -> ReplicaSpec:
    if arguments.spec is not None:
        spec = ReplicaSpec.from_json(arguments.spec.read_text(encoding="utf-8"))
    elif arguments.spec_strings is not None:
        spec = _from_strings(arguments.spec_strings)
    elif arguments.spec_piece:
        spec = spec_from_arguments([f"--spec-piece={piece}" for piece in arguments.spec_piece])
    else:
        spec = spec_from_environment(os.environ)
    index = _count("--index", arguments.index)
    earlier = sum(_count("--failed", text) for text in arguments.failed if text)
    return replace(spec, rank=spec.rank + index, attempt=spec.attempt + earlier)


def _from_strings(path: Path) -> ReplicaSpec:
    """The spec in a file of strings; the variables that are in it, too, are set for all that is started."""
    strings = loads(path.read_text(encoding="utf-8"), f"the file {path}")
    if type(strings) is not dict or not all(type(value) is str for value in strings.values()):
        raise InvalidRequestError(f"the file {path} is not a JSON object of text")
    spec = spec_from_environment(strings)
    os.environ.update(variables_from_strings(strings))
    return spec


def _count(name: str, text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise InvalidRequestError(f"{name} must be a whole number from {least}, not {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco_protocol.runner", description="Run one replica.", allow_abbrev=False
    )
    parser.add_argument("--spec", type=Path, help="file with the replica's spec")
    parser.add_argument(
        "--spec-strings",
        type=Path,
        help="file with a JSON object of text that has the spec's variables, and perhaps the program's; others are ignored",
    )
    parser.add_argument(
        "--spec-piece",
        action="append",
        default=[],
        help="the spec itself in pieces; default: from the environment",
    )
    parser.add_argument("--index", default="0", help="added to the spec's rank")
    parser.add_argument(
        "--failed", action="append", default=[], help="added to the spec's attempt; may be empty"
    )
    parser.add_argument("--outcome", type=Path, help="file to write the outcome to")
    parser.add_argument(
        "--message",
        type=Path,
        help="file that is overwritten with the outcome in a few KiB; more goes to stdout",
    )
    parser.add_argument(
        "--failure",
        type=Path,
        help="file that is overwritten with the outcome in a few KiB if the exit code is not 0",
    )
    parser.add_argument(
        "--message-bytes",
        default=str(MESSAGE_BYTES),
        help=f"how much --message and --failure may write; default: {MESSAGE_BYTES}",
    )
    parser.add_argument(
        "--result-bytes", help="largest result in bytes of JSON; default: no limit but --message's"
    )
    parser.add_argument(
        "--restarts", default="0", help="how often a failed attempt is started again in place"
    )
    parser.add_argument(
        "--attempts",
        type=Path,
        help="file that counts the attempts, for platforms that bring it back after an interruption",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the replica's exit code."""
    if os.name != "posix":
        raise SystemExit("diloco runs on Linux and macOS; on Windows use WSL")
    signals = _Signals()
    arguments = _parser().parse_args(argv)
    path: Path | None = None if arguments.outcome is None else arguments.outcome.absolute()
    folder = None if path is None else path.parent
    counter = AttemptCounter(arguments.attempts)
    size = MESSAGE_BYTES
    try:
        size = _count("--message-bytes", arguments.message_bytes, LEAST_MESSAGE_BYTES)
        restarts = _count("--restarts", arguments.restarts)
        most = (
            None
            if arguments.result_bytes is None
            else _count("--result-bytes", arguments.result_bytes)
        )
        if arguments.message is not None:
            # Where this file is empty, the kubelet takes the end of the log instead, which the replica can have written.
            _overwrite(arguments.message, STARTED_MESSAGE)
        outcome = run_attempts(
            _read_spec(arguments),
            lambda spec: _limited(run(spec, signals, folder), most),
            lambda: signals.told_to_end,
            counter,
            restarts,
        )
    except (DilocoError, OSError, UnicodeError) as error:
        name = type(error).__name__
        outcome = Outcome(
            START_FAILED_CODE,
            error=str(error),
            error_type=name,
            reason=Reason.START_FAILED,
            attempt=max(1, counter.started),
        )
    carried = any(each is not None for each in (path, arguments.message, arguments.failure))
    if outcome.error is not None and (not carried or outcome.reason is Reason.START_FAILED):
        # Only where nothing else can carry it: a log has what the replica wrote and nothing else.
        _tell(outcome.error)
    try:
        if path is not None:
            write_outcome(outcome, path)
        if arguments.message is not None:
            outcome = _write_message(outcome, arguments.message, size)
    except OSError as error:
        outcome = _unwritten(outcome, error)
    if arguments.failure is not None and outcome.exit_code != 0:
        try:
            text, _ = outcome_to_message(replace(outcome, result=None), size)
            arguments.failure.write_text(text, encoding="utf-8")
        except OSError as error:
            outcome = _unwritten(outcome, error)
    return outcome.exit_code


def _unwritten(outcome: Outcome, error: OSError) -> Outcome:
    """What an outcome becomes that cannot be told: never a success."""
    text = f"the outcome cannot be written: {error}"
    _tell(text)
    if outcome.exit_code != 0:
        return outcome
    name = type(error).__name__
    return replace(
        outcome, exit_code=1, result=None, error=text, error_type=name, reason=Reason.ERROR
    )


def _tell(text: str) -> None:
    print(f"diloco: {text}", file=sys.stderr, flush=True)  # noqa: T201 - stderr is the replica's log


if __name__ == "__main__":
    sys.exit(main())
