"""Runs one replica in any container or process.

The command line is ``python -m diloco_protocol.runner --spec FILE --outcome FILE``.

The runner starts the entrypoint in a child with a process group of its own, enforces the timeout,
passes signals on, reaps orphans (as PID 1 must), ends the whole tree within the grace and reports
an :class:`Outcome`. Python as PID 1 ignores SIGTERM unless it is handled, so the handlers are
installed at once.

The spec comes from one of these, or else from the environment:

  --spec FILE           the spec itself
  --spec-strings FILE   a JSON object of text that has the variables of the spec
                        (:func:`diloco_protocol.spec_to_environment`), and perhaps those of the
                        program; others are ignored
  --spec-piece PIECE    the spec in pieces (:func:`diloco_protocol.spec_to_arguments`)

Where one template serves a whole cohort:

  --index N             added to the spec's rank
  --failed N            added to the spec's attempt; may be empty, and given several times

The outcome goes to these:

  --outcome FILE        all of it
  --message FILE        overwritten with it in a few KiB; more goes to stdout
                        (:func:`diloco_protocol.outcome_to_message`)
  --failure FILE        overwritten with it in a few KiB if the exit code is not 0
  --message-bytes N     how much --message and --failure may write; default: 4096
  --result-bytes N      largest result in bytes of JSON; --message carries less than the default

And further:

  --restarts N          how often a failed attempt is started again in place, for platforms that
                        never restart a replica themselves; by default "elsewhere": something else
                        may start it again
  --attempts FILE       counts the attempts, for platforms that bring the file back after an
                        interruption
  --check FILE          only import the entrypoint and check its arguments; write that outcome to
                        FILE

A program that raises an error has the exit code 1. If the error says that it would come again
(``DilocoError.final``), it has 79, and is not started again.

The runner exits with the replica's own exit code, with three exceptions. If signal n ended the
replica, or was sent to it and it exited with 0 before its entrypoint had returned, the code is 128
+ n. If it exited with 0 only after its timeout, the code is 124. If the replica could not be
started, the code is 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ._attempts import AttemptCounter, Signals, run_attempt, run_attempts
from ._channels import spec_from_arguments, spec_from_environment, variables_from_strings
from ._checks import read_whole
from ._child import call
from ._errors import DilocoError
from ._fields import LARGEST
from ._json import RESULT_BYTES, loads_texts
from ._message import (
    LEAST_MESSAGE_BYTES,
    MESSAGE_BYTES,
    STARTED_MESSAGE,
    limited,
    outcome_to_message,
    overwrite,
    write_message,
    write_outcome,
)
from ._outcome import Outcome
from ._spec import ReplicaSpec
from ._types import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

START_FAILED_CODE = 2


def _read_spec(arguments: argparse.Namespace) -> ReplicaSpec:
    if arguments.spec is not None:
        spec = ReplicaSpec.from_json(arguments.spec.read_text(encoding="utf-8"))
    elif arguments.spec_strings is not None:
        spec = _from_strings(arguments.spec_strings)
    elif arguments.spec_piece:
        spec = spec_from_arguments([f"--spec-piece={piece}" for piece in arguments.spec_piece])
    else:
        spec = spec_from_environment(os.environ)
    index = read_whole("--index", arguments.index, 0, LARGEST)
    earlier = sum(read_whole("--failed", text, 0, LARGEST) for text in arguments.failed if text)
    return replace(spec, rank=spec.rank + index, attempt=spec.attempt + earlier)


def _from_strings(path: Path) -> ReplicaSpec:
    """Return the spec in a file of strings.

    Other variables in the file are set in the environment of everything that is started.
    """
    strings = loads_texts(path.read_text(encoding="utf-8"), f"the file {path}")
    spec = spec_from_environment(strings)
    os.environ.update(variables_from_strings(strings))
    return spec


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diloco_protocol.runner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name in ("spec", "spec-strings", "check", "outcome", "message", "failure", "attempts"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("spec-piece", "failed"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("--index", default="0")
    parser.add_argument("--message-bytes", default=str(MESSAGE_BYTES))
    parser.add_argument("--result-bytes", default=str(RESULT_BYTES))
    parser.add_argument("--restarts", default="elsewhere")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the replica's exit code."""
    if os.name != "posix":
        raise SystemExit("diloco runs on Linux and macOS; on Windows use WSL")
    arguments = _parse(argv)
    if arguments.check is not None:
        return call(_read_spec(arguments), arguments.check, only_check=True)
    signals = Signals()
    path: Path | None = None if arguments.outcome is None else arguments.outcome.absolute()
    folder = None if path is None else path.parent
    counter = AttemptCounter(arguments.attempts)
    size = MESSAGE_BYTES
    try:
        size = read_whole("--message-bytes", arguments.message_bytes, LEAST_MESSAGE_BYTES, LARGEST)
        restarts = None
        if arguments.restarts != "elsewhere":
            restarts = read_whole("--restarts", arguments.restarts, 0, LARGEST)
        most = read_whole("--result-bytes", arguments.result_bytes, 0, LARGEST)
        if arguments.message is not None:
            # If this file is empty, the kubelet takes the end of the log instead, which the replica
            # may have written.
            overwrite(arguments.message, STARTED_MESSAGE)
        outcome = run_attempts(
            _read_spec(arguments),
            lambda spec, last: limited(run_attempt(spec, signals, folder, last=last), most),
            lambda: signals.told_to_end,
            counter,
            restarts,
        )
    except (DilocoError, OSError, ValueError) as error:  # ValueError: such as a NUL in a variable
        name = type(error).__name__
        outcome = Outcome(
            START_FAILED_CODE,
            error=str(error),
            error_type=name,
            reason=Reason.START_FAILED,
            attempt=max(1, counter.started),
        )
    carried = any(file is not None for file in (path, arguments.message, arguments.failure))
    if outcome.error is not None and (not carried or outcome.reason is Reason.START_FAILED):
        # Only if no file carries the error: a log has what the replica wrote and nothing else.
        _tell(outcome.error)
    try:
        if path is not None:
            write_outcome(outcome, path)
        if arguments.message is not None:
            outcome = write_message(outcome, arguments.message, size)
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
    """Return what becomes of an outcome that cannot be written: never a success."""
    text = f"the outcome cannot be written: {error}"
    _tell(text)
    if outcome.exit_code != 0:
        return outcome
    name = type(error).__name__
    return replace(
        outcome, exit_code=1, result=None, error=text, error_type=name, reason=Reason.ERROR
    )


def _tell(text: str) -> None:
    # Stderr is the replica's log
    print(f"diloco: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _exit(code: int) -> NoReturn:
    """End the process with ``code``.

    With PYTHONINSPECT, Python would print a SystemExit, go on, and end with 1.
    """
    if sys.flags.inspect:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _exit(main())
