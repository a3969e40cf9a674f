"""An outcome through a narrow channel: a few KiB of text, and marked log lines for a result that does not fit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ._errors import InvalidRequestError
from ._json import dumps, loads
from ._outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

MESSAGE_BYTES = 4096
"""What Kubernetes keeps of a container's termination message."""
_MARK = "diloco-result "
_PIECE = 8_000
_CUT = "\n[... cut ...]\n"


@dataclass(frozen=True, slots=True)
class OutcomeMessage:
    """What a message says.

    Attributes:
        outcome: The outcome; without its result if that is in the log.
        result_lines: How many log lines carry the result; 0 if the outcome has it.
        result_sha256: Digest of the result's JSON there; empty if the outcome has it.
        max_result_bytes: Largest result, in bytes of JSON, that is sent through log lines.
    """

    max_result_bytes: ClassVar[int] = 1 << 20

    outcome: Outcome
    result_lines: int = 0
    result_sha256: str = ""


def outcome_to_message(outcome: Outcome) -> tuple[str, list[str]]:
    """An outcome as text of at most 4096 bytes, and the log lines that carry what does not fit.

    A long error or traceback loses its middle; a long result is moved to the lines, whole.

    Raises:
        InvalidRequestError: The result is larger than 1 MiB of JSON, or is not JSON.
    """
    text = outcome.to_json()
    if len(text) <= MESSAGE_BYTES:
        return text, []
    lines: list[str] = []
    digest = ""
    if outcome.result is not None:
        lines, digest = _to_lines(dumps(outcome.result))
    room = MESSAGE_BYTES // 2
    while True:
        short = replace(
            outcome,
            result=None,
            error=_shorten(outcome.error, room // 2),
            traceback=_shorten(outcome.traceback, room),
        )
        message = OutcomeMessage(short, len(lines), digest)
        text = dumps(
            {
                **{f.name: getattr(message, f.name) for f in fields(message)},
                "outcome": loads(short.to_json(), ""),
            }
        )
        if len(text) <= MESSAGE_BYTES:
            return text, lines
        room //= 2


def outcome_from_message(text: str) -> OutcomeMessage:
    """The inverse of :func:`outcome_to_message`, except for the lines.

    Raises:
        SpecVersionError: It was written by another version.
        InvalidRequestError: It is not such a message.
    """
    data = loads(text, "this message")
    if not isinstance(data, dict) or "outcome" not in data:
        return OutcomeMessage(Outcome.from_json(text))
    if data.keys() != {f.name for f in fields(OutcomeMessage)}:
        raise InvalidRequestError(f"this message has the unknown fields {sorted(data)}")
    lines, digest = data["result_lines"], data["result_sha256"]
    if type(lines) is not int or lines < 0 or type(digest) is not str:
        raise InvalidRequestError(
            f"this message has result_lines={lines!r} and result_sha256={digest!r}"
        )
    return OutcomeMessage(Outcome.from_json(dumps(data["outcome"])), lines, digest)


def result_from_lines(message: OutcomeMessage, lines: Iterable[str]) -> Any:
    """The result that log lines carry; other lines are ignored.

    Raises:
        InvalidRequestError: Lines are missing or damaged.
    """
    mark = f"{_MARK}{message.result_sha256[:16]} "
    pieces: dict[int, str] = {}
    for line in lines:
        if line.startswith(mark):
            number, _, piece = line.removeprefix(mark).partition(" ")
            if number.isdecimal():
                pieces[int(number)] = piece
    missing = [number for number in range(message.result_lines) if number not in pieces]
    if missing:
        raise InvalidRequestError(
            f"{len(missing)} of the {message.result_lines} log lines that carry the result are not in the log"
        )
    text = "".join(pieces[number] for number in range(message.result_lines))
    if _digest(text) != message.result_sha256:
        raise InvalidRequestError(
            "the log lines that carry the result are damaged: their checksum differs"
        )
    return loads(text, "the result in the log")


def is_result_line(line: str) -> bool:
    """Whether a log line carries a piece of a result, so that it is left out when the log is read."""
    return line.startswith(_MARK)


def _to_lines(text: str) -> tuple[list[str], str]:
    limit = OutcomeMessage.max_result_bytes
    if len(text) > limit:
        raise InvalidRequestError(
            f"the result is {len(text)} bytes of JSON; this backend carries up to {limit}: "
            "write it to the rendezvous and return its name"
        )
    digest = _digest(text)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"{_MARK}{digest[:16]} {number} {piece}" for number, piece in enumerate(pieces)], digest


def _digest(text: str) -> str:
    import hashlib  # slow to import

    return hashlib.sha256(text.encode()).hexdigest()


def _shorten(text: str | None, room: int) -> str | None:
    """Both ends of a text: the beginning says where it happened, the end what it was."""
    if text is None or len(text) <= room:
        return text
    half = max(0, (room - len(_CUT)) // 2)
    return f"{text[:half]}{_CUT}{text[len(text) - half :]}"
