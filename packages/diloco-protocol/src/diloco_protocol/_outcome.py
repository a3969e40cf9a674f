"""The record in which a replica's end is reported, whatever channel the backend uses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ._checks import check_whole, shown
from ._errors import InvalidRequestError
from ._fields import check_fields, check_version, sound_text
from ._json import OUTCOME_BYTES, RESULT_BYTES, check_json, dumps, loads_bounded
from ._types import Reason

OUTCOME_VERSION = 2

FINAL_CODE = 79
"""Exit code of a replica that must not be started again.

Another process has taken its place, which it would take back, and so on forever; or its error, such
as an argument that is not allowed, would come again.
"""

REPORTED = frozenset(
    {
        Reason.COMPLETED,
        Reason.ERROR,
        Reason.TIMEOUT,
        Reason.START_FAILED,
        Reason.CANCEL_REQUESTED,
    }
)
"""The reasons that a runner reports. All others need evidence that only the platform has."""
_CHECKED = (
    *("exit_code", "signal", "error", "error_type", "traceback"),
    *("started_at", "finished_at", "attempt"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The way in which one attempt ended.

    Attributes:
        exit_code: The exit code of the replica's program, 0 to 255; 128 + n for signal n.
        signal: Name of the signal that ended it, such as ``"SIGKILL"``.
        error: What went wrong, in a sentence; None if nothing did.
        error_type: Class of the exception, if there was one.
        traceback: Its traceback.
        result: What the entrypoint returned, a JSON value.
        reason: COMPLETED if and only if the exit code is 0; otherwise ERROR, TIMEOUT, START_FAILED,
            or CANCEL_REQUESTED if the runner was asked to stop. If it is left out, it is COMPLETED
            or ERROR.
        started_at: Start of the attempt in Unix seconds.
        finished_at: End of the attempt in Unix seconds.
        attempt: Which attempt of the rank this was, from 1.
        version: Version of this record.
    """

    exit_code: int
    signal: str | None = None
    error: str | None = None
    error_type: str | None = None
    traceback: str | None = None
    result: Any = None
    reason: Reason = None  # type: ignore[assignment] # it is never None once the outcome is made
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 1
    version: int = OUTCOME_VERSION

    def __post_init__(self) -> None:
        if not self.reason:
            reason = Reason.COMPLETED if self.exit_code == 0 else Reason.ERROR
            object.__setattr__(self, "reason", reason)

    def to_json(self) -> str:
        """Return the outcome as compact JSON, with texts as :func:`sound_text` makes them.

        Raises:
            InvalidRequestError: A field has a value that no outcome can have, or JSON cannot carry
                the result exactly (the error names the path to the value), or the result is larger
                than 16 MiB of JSON.
        """
        sound = with_sound_texts(self)
        _check(sound)
        check_version("this outcome", {"version": self.version}, OUTCOME_VERSION)
        text = dumps({f.name: getattr(sound, f.name) for f in fields(self)})
        if len(text) > RESULT_BYTES:
            check_result_size(self.result, RESULT_BYTES)
        return text

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Make an outcome from the result of :meth:`to_json`.

        Raises:
            SpecVersionError: The data was written by another version.
            InvalidRequestError: The text is not an outcome, or is larger than any outcome.
        """
        outcome = cls.from_data(loads_bounded(text, "this outcome", OUTCOME_BYTES))
        if len(text) > RESULT_BYTES // 6:  # compact ASCII JSON of it may be up to six times as long
            check_result_size(outcome.result, RESULT_BYTES)
        return outcome

    @classmethod
    def from_data(cls, data: object) -> Outcome:
        """Make an outcome from parsed JSON, as :meth:`from_json` does from text.

        Raises:
            SpecVersionError: The data was written by another version.
            InvalidRequestError: The data is not an outcome.
        """
        data = check_version("this outcome", data, OUTCOME_VERSION)
        names = {f.name for f in fields(cls)}
        if data.keys() != names:
            raise InvalidRequestError(
                f"this outcome has the fields {shown(sorted(data))} instead of {sorted(names)}"
            )
        reason = next((reason for reason in Reason if reason == data["reason"]), None)
        if reason is None:
            raise InvalidRequestError(
                f"this outcome has the unknown reason {shown(data['reason'])}"
            )
        outcome = cls(**{**data, "reason": reason})
        _check(outcome)
        return outcome


def _check(outcome: Outcome) -> None:
    """Refuse an outcome that no runner reports. Used when writing and when reading."""
    check_fields("this outcome", outcome, _CHECKED)
    check_whole("the exit_code of this outcome", outcome.exit_code, 0)  # a status may lack it
    if str(outcome.reason) not in REPORTED:  # a list, for one, cannot be looked up
        raise InvalidRequestError(
            f"this outcome has the reason {shown(str(outcome.reason))}, and a replica reports only "
            f"{', '.join(sorted(REPORTED))}"
        )
    succeeded = outcome.exit_code == 0
    if succeeded != (outcome.reason is Reason.COMPLETED) or (succeeded and outcome.signal):
        raise InvalidRequestError(
            f"this outcome has exit_code={outcome.exit_code}, reason={str(outcome.reason)!r} and "
            f"signal={outcome.signal!r}: a success, and nothing else, has the exit code 0, the "
            "reason 'completed' and no signal"
        )
    check_json(outcome.result, "result")


def with_sound_texts(outcome: Outcome) -> Outcome:
    """Return an outcome whose texts every reader accepts."""
    return replace(
        outcome,
        error=_sound(outcome.error),
        error_type=_sound(outcome.error_type),
        traceback=_sound(outcome.traceback),
    )


def _sound(text: str | None) -> str | None:
    return sound_text(text) if isinstance(text, str) else text  # other types are refused later


def check_result_size(result: Any, most: int) -> None:
    """Refuse a result that is larger than a channel can carry.

    Raises:
        InvalidRequestError: The result has more than ``most`` bytes as JSON; the error says how
            many.
    """
    if result is not None and (size := len(dumps(result))) > most:
        raise InvalidRequestError(
            f"the result is {size} bytes of JSON; this backend carries up to {most}: write it to "
            "the rendezvous and return its name"
        )
