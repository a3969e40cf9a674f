"""Read a FailureReason: SageMaker's own words, with or without the runner's message in them."""

from __future__ import annotations

import re

from diloco_protocol import DilocoError, Outcome, Reason, outcome_from_message
from diloco_protocol.backend import signal_name

# SageMaker puts the exit code behind what a program has written about itself, which can be any
# text.
_EXIT_CODE = re.compile(r"AlgorithmError: .*, exit code: ([0-9]{1,3})", re.DOTALL)
# A ClientError comes from SageMaker itself; texts of a program stand behind "AlgorithmError: ".
_NO_MEMORY = "ClientError: Please use an instance type with more memory"


def outcome_in(failure: str) -> Outcome | None:
    """Return the runner's outcome in a FailureReason.

    None if there is no outcome, if it was cut, or if SageMaker reports another exit code.
    """
    try:
        outcome = outcome_from_message(failure[failure.find("{") : failure.rfind("}") + 1]).outcome
    except DilocoError:
        return None
    return outcome if _exit_code(failure) in {None, outcome.exit_code} else None


def outcome_without(failure: str, *, trained: bool) -> tuple[Reason, int | None, str | None]:
    """Return reason, exit code and signal of a failure about which the runner has left no message.

    Args:
        failure: The FailureReason.
        trained: Whether the program has run.
    """
    code = _exit_code(failure)
    signal = signal_name(code - 128) if code is not None and 128 < code <= 192 else None
    kind = failure.partition(":")[0]
    if kind in {"CapacityError", "InternalServerError", "InternalError"}:
        return Reason.PLATFORM, code, signal
    if failure.startswith(_NO_MEMORY):
        return Reason.OOM, 137, "SIGKILL"  # as the kernel ends a process that uses too much
    if not trained and code is None:
        return Reason.START_FAILED, None, None
    return Reason.ERROR, code, signal


def _exit_code(failure: str) -> int | None:
    """Return the exit code that SageMaker itself reports; None if there is none."""
    match = _EXIT_CODE.fullmatch(failure)
    return None if match is None or int(match[1]) > 255 else int(match[1])
