"""The envelope in which a replica's end is reported, whatever the backend's channel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ._errors import InvalidRequestError, SpecVersionError
from ._json import check_json, dumps, loads
from ._types import Reason

OUTCOME_VERSION = 2

LATEST = 253_402_300_799
"""The end of the year 9999 in Unix seconds, which is the last that dates can say."""
_TEXT = (str, type(None))
_TIME = (float, int, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    "exit_code": (int,),
    "attempt": (int,),
    **dict.fromkeys(("signal", "error", "error_type", "traceback"), _TEXT),
    **dict.fromkeys(("started_at", "finished_at"), _TIME),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended.

    Attributes:
        exit_code: The exit code of the replica's program; 128 + n for signal n.
        signal: Name of the signal that ended it, such as ``"SIGKILL"``.
        error: What went wrong, in a sentence; None if nothing did.
        error_type: Class of the exception, if there was one.
        traceback: Its traceback.
        result: What the entrypoint returned, a JSON value.
        reason: COMPLETED, ERROR, TIMEOUT, START_FAILED, or CANCEL_REQUESTED if the runner was asked to stop.
        started_at: Unix seconds.
        finished_at: Unix seconds.
        attempt: Which attempt of the rank this was, from 1.
        version: Version of this record.
    """

    exit_code: int
    signal: str | None = None
    error: str | None = None
    error_type: str | None = None
    traceback: str | None = None
    result: Any = None
    reason: Reason = Reason.ERROR
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 1
    version: int = OUTCOME_VERSION

    def to_json(self) -> str:
        """The outcome as compact JSON.

        Raises:
            InvalidRequestError: JSON cannot carry the result exactly; names the path to the value.
        """
        check_json(self.result, "result")
        return dumps({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """The inverse of :meth:`to_json`.

        Raises:
            SpecVersionError: It was written by another version.
            InvalidRequestError: It is not an outcome.
        """
        return cls.from_data(loads(text, "this outcome"))

    @classmethod
    def from_data(cls, data: object) -> Outcome:
        """As :meth:`from_json`, from JSON that has been parsed.

        Raises:
            SpecVersionError: It was written by another version.
            InvalidRequestError: It is not an outcome.
        """
        if not isinstance(data, dict) or data.get("version") != OUTCOME_VERSION:
            version = data.get("version") if isinstance(data, dict) else None
            raise SpecVersionError(
                f"this outcome has version {shown(version)}, and this diloco-protocol reads version {OUTCOME_VERSION}"
            )
        names = {f.name for f in fields(cls)}
        if data.keys() != names:
            raise InvalidRequestError(
                f"this outcome has the fields {sorted(data)} instead of {sorted(names)}"
            )
        for name, kinds in _KINDS.items():
            if type(data[name]) not in kinds:
                raise InvalidRequestError(f"this outcome has {name}={shown(data[name])}")
        if not 0 <= data["exit_code"] <= 255:
            raise InvalidRequestError(
                f"this outcome has exit_code={shown(data['exit_code'])}, and programs exit with 0 to 255"
            )
        if not 1 <= data["attempt"] < 1 << 31:
            raise InvalidRequestError(
                f"this outcome has attempt={shown(data['attempt'])}, and attempts are counted from 1"
            )
        for name in ("started_at", "finished_at"):
            if data[name] is not None and not 0 <= data[name] <= LATEST:
                raise InvalidRequestError(
                    f"this outcome has {name}={shown(data[name])}, and a time is a number of seconds since 1970"
                )
        for name in ("signal", "error", "error_type", "traceback", "result"):
            check_json(data[name], name)  # also what JSON can say, and nobody can print or send on
        try:
            reason = Reason(data["reason"])
        except ValueError:
            raise InvalidRequestError(
                f"this outcome has the unknown reason {shown(data['reason'])}"
            ) from None
        return cls(**{**data, "reason": reason})


def shown(value: object) -> str:
    """A value as an error message can show it."""
    # An integer of thousands of digits cannot even be shown.
    return (
        "a number of that size"
        if type(value) is int and value.bit_length() > 64
        else repr(value)[:200]
    )
