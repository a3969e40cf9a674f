"""The ways in which the runner reports an outcome: in files and in log lines.

Files are replaced in one step or written in place. Results that are too large are refused here.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ._bounds import OUTCOME_BYTES, read_bounded
from ._errors import DilocoError, InvalidRequestError
from ._message import outcome_to_message
from ._outcome import FINAL_CODE, Outcome, check_result_size
from ._types import Reason


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write an outcome in one step: a reader sees all of it or nothing.

    Raises:
        OSError: The file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(outcome.to_json())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_message(outcome: Outcome, path: Path, size: int) -> Outcome:
    """Report through a file that is written in place, and log lines; return what was reported.

    In a container, the file is a mount, and cannot be replaced.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        text, lines = outcome_to_message(outcome, size)
    except InvalidRequestError as error:
        outcome = _invalid_result(outcome, str(error))
        text, lines = outcome_to_message(outcome, size)
    for line in lines:
        print(line, flush=True)  # noqa: T201 - stdout is the replica's log
    overwrite(path, text)
    return outcome


def overwrite(path: Path, text: str) -> None:
    """Write a file in place, so that it is never empty in between."""
    data = text.encode()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        file.truncate(len(data))


def read_report(path: Path) -> Outcome | None:
    """Return what the entrypoint's process reported; None if it has reported nothing.

    A report that cannot be read is a failure: the entrypoint may have written anything there.
    """
    try:
        # Without blocking, since it could be a FIFO to which no process writes.
        with open(path, "rb", opener=_opened_at_once) as file:
            report = read_bounded(file, OUTCOME_BYTES, "the report")
        return Outcome.from_json(report.decode())
    except FileNotFoundError:
        return None
    except (OSError, DilocoError, UnicodeDecodeError) as error:
        text = f"what the entrypoint's process reported cannot be read: {error}"
        return Outcome(1, error=text, error_type="InvalidReport")


def _opened_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def limited(outcome: Outcome, most: int) -> Outcome:
    """Return an outcome whose result has at most ``most`` bytes of JSON.

    If the result is larger, the outcome is a failure that says so.
    """
    try:
        check_result_size(outcome.result, most)
    except InvalidRequestError as error:
        return _invalid_result(outcome, str(error))
    return outcome


def _invalid_result(outcome: Outcome, error: str) -> Outcome:
    return replace(
        outcome,
        exit_code=FINAL_CODE,
        result=None,
        error=error,
        error_type="InvalidResult",
        reason=Reason.ERROR,
    )
