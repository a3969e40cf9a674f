"""The ways in which an outcome is reported: in files, in a narrow channel, in log lines.

The channel holds a few KiB of text; a result that does not fit goes into marked log lines.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ._checks import check_whole, shown
from ._errors import DilocoError, InvalidRequestError
from ._fields import shorten
from ._json import OUTCOME_BYTES, check_json, check_size, dumps, loads, loads_bounded, read_bounded
from ._outcome import FINAL_CODE, Outcome, check_result_size, with_sound_texts
from ._types import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MESSAGE_BYTES = 4096
"""Number of bytes that Kubernetes keeps of a container's termination message."""
LEAST_MESSAGE_BYTES = 512
"""Number of bytes that an outcome needs when its texts are cut to nothing."""
STARTED_MESSAGE = "the runner had started, and was ended before it could report"
"""The message that stands in place of an outcome until there is one."""
_MARK = "diloco-result "
_PIECE = 8_000
_NUMBER = re.compile("[0-9]{1,8}")
_RESULT_LINE = re.compile(f"{_MARK}[0-9a-f]{{16}} {_NUMBER.pattern} ")
_SHA256 = re.compile("[0-9a-f]{64}")
_SHORTEST_TRACEBACK = 100  # characters; a shorter one says less than the error
_LONGEST_TYPE = 60  # characters of a class name, which the replica's program chooses


@dataclass(frozen=True, slots=True)
class OutcomeMessage:
    """The content of a message.

    Attributes:
        outcome: The outcome, without its result if that is in the log.
        result_lines: Number of log lines that carry the result; 0 if the outcome has it.
        result_sha256: Digest of the JSON of the result in the log; empty if the outcome has it.
        max_result_bytes: Largest result, in bytes of JSON, that is sent through log lines.
    """

    max_result_bytes: ClassVar[int] = 1 << 20

    outcome: Outcome
    result_lines: int = 0
    result_sha256: str = ""


def outcome_to_message(
    outcome: Outcome, message_bytes: int = MESSAGE_BYTES
) -> tuple[str, list[str]]:
    """Return an outcome as text, and the log lines that carry what does not fit.

    The text has at most ``message_bytes`` bytes. A long error or traceback loses its middle, and
    where there is little room, the traceback is left out before the error is cut further. A long
    result is moved to the log lines, whole.

    Args:
        outcome: The outcome.
        message_bytes: Number of bytes that the channel holds, from 512.

    Raises:
        InvalidRequestError: The result is larger than 1 MiB of JSON, or is not JSON; or there is
            too little room.
    """
    check_whole("message_bytes", message_bytes, LEAST_MESSAGE_BYTES)
    outcome = with_sound_texts(outcome)
    text = outcome.to_json()
    if len(text) <= message_bytes:
        return text, []
    lines: list[str] = []
    digest = ""
    if outcome.result is not None:
        check_result_size(outcome.result, OutcomeMessage.max_result_bytes)
        lines, digest = _to_lines(dumps(outcome.result))
    for error_room, traceback_room in _rooms(message_bytes):
        short = replace(
            outcome,
            result=None,
            error=_shorten(outcome.error, error_room),
            error_type=None if outcome.error_type is None else outcome.error_type[:_LONGEST_TYPE],
            traceback=_shorten(outcome.traceback, traceback_room) if traceback_room else None,
        )
        message = OutcomeMessage(short, len(lines), digest)
        text = dumps(
            {
                **{f.name: getattr(message, f.name) for f in fields(message)},
                "outcome": asdict(short),
            }
        )
        if len(text) <= message_bytes:
            break
    return text, lines


def _rooms(message_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield how many characters of the error and of the traceback to try.

    They get fewer and fewer, since some characters take six bytes.
    """
    error, traceback = max(message_bytes // 4, 256), message_bytes // 2
    while traceback >= _SHORTEST_TRACEBACK:
        yield error, traceback
        traceback //= 2
    while error:
        yield error, 0
        error //= 2
    yield 0, 0


def outcome_from_message(text: str) -> OutcomeMessage:
    """Make a message from the text of :func:`outcome_to_message`; the log lines are not read.

    Raises:
        SpecVersionError: The message was written by another version.
        InvalidRequestError: The text is not such a message.
    """
    data = loads_bounded(text, "this message", OUTCOME_BYTES)
    if not isinstance(data, dict) or "outcome" not in data:
        return OutcomeMessage(Outcome.from_data(data))
    if data.keys() != {f.name for f in fields(OutcomeMessage)}:
        raise InvalidRequestError(f"this message has the unknown fields {shown(sorted(data))}")
    lines, digest = data["result_lines"], data["result_sha256"]
    most = -(-OutcomeMessage.max_result_bytes // _PIECE)
    has_lines = type(lines) is int and 0 < lines <= most
    has_digest = type(digest) is str and _SHA256.fullmatch(digest) is not None
    if not (has_lines and has_digest) and (type(lines) is not int or (lines, digest) != (0, "")):
        raise InvalidRequestError(
            f"this message has result_lines={shown(lines)} and result_sha256={shown(digest)}, and "
            f"it must be a number up to {most} with 64 hexadecimal digits, or 0 with no text"
        )
    return OutcomeMessage(Outcome.from_data(data["outcome"]), lines, digest)


def result_from_lines(message: OutcomeMessage, lines: Iterable[str]) -> Any:
    """Read the result that log lines carry; other lines are ignored.

    A replica can write such lines itself, so their content is compared with what the runner would
    have written.

    Raises:
        InvalidRequestError: Lines are missing or damaged, or JSON cannot carry the result exactly,
            or the result is too large.
    """
    mark = f"{_MARK}{message.result_sha256[:16]} "
    pieces: dict[int, str] = {}
    for line in lines:
        if line.startswith(mark):
            number, _, piece = line.removeprefix(mark).partition(" ")
            is_number = _NUMBER.fullmatch(number) and int(number) < message.result_lines
            if is_number and len(piece) <= _PIECE:
                pieces[int(number)] = piece
    missing = [number for number in range(message.result_lines) if number not in pieces]
    if missing:
        raise InvalidRequestError(
            f"{len(missing)} of the {message.result_lines} log lines that carry the result are not "
            "in the log"
        )
    text = "".join(pieces[number] for number in range(message.result_lines))
    if _digest(text) != message.result_sha256:
        raise InvalidRequestError(
            "the log lines that carry the result are damaged: their checksum differs"
        )
    check_size("the result in the log", len(text), OutcomeMessage.max_result_bytes)
    result = loads(text, "the result in the log")
    check_json(result, "the result in the log")
    return result


def is_result_line(line: str) -> bool:
    """Return whether a log line carries a piece of a result; readers of the log leave it out."""
    return _RESULT_LINE.match(line) is not None


def _to_lines(text: str) -> tuple[list[str], str]:
    digest = _digest(text)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"{_MARK}{digest[:16]} {number} {piece}" for number, piece in enumerate(pieces)], digest


def _digest(text: str) -> str:
    import hashlib  # slow to import

    # Text from a log may contain anything; text that no runner has written has another digest.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _shorten(text: str | None, room: int) -> str | None:
    return None if text is None else shorten(text, room)


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
