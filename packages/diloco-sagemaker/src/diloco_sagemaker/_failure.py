"""What a FailureReason says: the runner's message in SageMaker's words, or SageMaker's words alone."""

from __future__ import annotations

import json
import re
from signal import Signals

from diloco_protocol import DilocoError, Outcome, Reason, outcome_from_message

_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
_LARGER = "use an instance type with more memory"


def outcome_in(failure: str) -> Outcome | None:
    """The runner's outcome in a FailureReason; None if there is none, or it was cut."""
    start = failure.find("{")
    while start >= 0:
        try:
            _, end = json.JSONDecoder().raw_decode(failure[start:])
            return outcome_from_message(failure[start : start + end]).outcome
        except (ValueError, DilocoError):
            start = failure.find("{", start + 1)
    return None


def outcome_without(failure: str, *, trained: bool) -> tuple[Reason, int | None, str | None]:
    """Reason, exit code and signal where the runner has left no word.

    Args:
        failure: The FailureReason.
        trained: Whether the program has run.
    """
    match = _EXIT_CODE.search(failure)
    code = int(match[1]) if match is not None else None
    signal = None
    if code is not None and code > 128:
        try:
            signal = Signals(code - 128).name
        except ValueError:
            signal = None
    kind = failure.partition(":")[0]
    if kind in {"CapacityError", "InternalServerError", "InternalError"}:
        return Reason.PLATFORM, code, signal
    if _LARGER in failure.lower():
        return Reason.OOM, code, signal
    if not trained and code is None:
        return Reason.START_FAILED, None, None
    return Reason.ERROR, code, signal
