"""JSON that comes back exactly as it went in, or is refused; and bounds on what is read.

There is one bound per kind of object that a launcher reads. Such an object may have been written by
a replica, or by a stranger who guessed its name. So a reader checks the size itself, and never
relies on what our own writers would have refused.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from ._checks import has_half_a_pair, shown
from ._errors import InvalidRequestError
from ._redact import redact_and_cut

if TYPE_CHECKING:
    from typing import Protocol

    class _Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...


RESULT_BYTES = 16 * 1024 * 1024
"""Largest result of a replica, in bytes of JSON, on every backend. A backend may allow less."""
OUTCOME_BYTES = RESULT_BYTES + 1024 * 1024
"""Largest outcome, in bytes of JSON: a result and the texts beside it."""
RECORD_BYTES = 8 * 1024 * 1024
"""Largest record of a run or of a launch, in bytes."""
_PIECE = 1 << 20
# Python's own parser refuses integers of more than 4300 digits, which are 14,284 bits, or of more
# digits than PYTHONINTMAXSTRDIGITS allows.
_MAX_INTEGER_BITS = 14_000
_EVER_READ = 2_000  # bits; fewer than 640 digits, the smallest limit that Python accepts
# Far below the recursion limit, however deep the stack of the reader already is.
_MAX_DEPTH = 200
# How many characters of a path, and of a key in it, an error shows.
_SHOWN = 200


def check_json(value: Any, path: str) -> None:
    """Refuse a value that JSON cannot carry exactly.

    Args:
        value: Anything.
        path: Name of the value in the error, such as ``"kwargs"``.

    Raises:
        InvalidRequestError: The value is refused; the error names the path to the part that is
            wrong, what it is, and what is allowed.
    """
    if not _plain(value):
        _check(value, [path], set())


def dumps(value: Any) -> str:
    """Return compact JSON, with the order of keys kept.

    The value must have passed :func:`check_json`.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> str:
    """Return compact JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def loads(text: object, what: str) -> Any:
    """Parse JSON, strictly.

    Raises:
        InvalidRequestError: The text is not JSON; the error calls it ``what``.
    """
    if not isinstance(text, (str, bytes)):
        raise InvalidRequestError(f"{what} must be JSON in text, not {shown(text)}")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}") from None


def loads_bounded(text: object, what: str, most: int) -> Any:
    """Parse JSON of at most ``most`` characters; raises as :func:`loads` does."""
    if isinstance(text, (str, bytes)):
        check_size(what, len(text), most)
    return loads(text, what)


def loads_texts(text: str, what: str) -> dict[str, str]:
    """Parse a JSON object of text; raises as :func:`loads` does."""
    texts = loads(text, what)
    if type(texts) is not dict or not all(type(value) is str for value in texts.values()):
        raise InvalidRequestError(f"{what} is not a JSON object of text")
    return texts


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _plain(value: Any) -> bool:
    """Return whether a value is plain, so that it needs no closer look.

    The path to a value is only put together if it is not plain.
    """
    kind = type(value)
    return (
        value is None
        or kind is bool
        or (kind is float and math.isfinite(value))
        or (
            kind is int and (value.bit_length() <= _EVER_READ or value.bit_length() <= _most_bits())
        )
        or (kind is str and value.isascii())
    )


def _most_bits() -> int:
    digits = sys.get_int_max_str_digits()  # 0 means no limit
    return min(_MAX_INTEGER_BITS, digits * 3321 // 1000) if digits else _MAX_INTEGER_BITS


def _check(value: Any, path: list[str | int], above: set[int]) -> None:
    """Refuse a value that is not plain if JSON cannot carry it exactly.

    Args:
        value: Anything.
        path: Name of the whole value, and the keys and numbers that lead from there to this one.
            They are only joined for an error: a text for each value would be as long as all keys
            above it.
        above: The ids of the lists and dicts that contain this value.
    """
    kind = type(value)
    if kind is list or kind is dict:
        if id(value) in above:
            raise InvalidRequestError(f"{_shown(path)} contains itself")
        if len(above) >= _MAX_DEPTH:
            raise InvalidRequestError(
                f"the JSON value around {_shown(path)} is nested more than {_MAX_DEPTH} levels deep"
            )
        above.add(id(value))
        for place, item in enumerate(value) if kind is list else value.items():
            if kind is dict and not (type(place) is str and _plain(place)):
                _check_key(place, path)
            if not _plain(item):
                path.append(place)
                _check(item, path, above)
                path.pop()
        above.remove(id(value))
        return
    if kind is str:
        if not has_half_a_pair(value):
            return
        what = "contains half of a surrogate pair, which cannot be sent as text"
    elif kind is float:
        what = f"is {value}, and JSON has no number for that: pass None or text instead"
    elif kind is int:
        what = f"is an integer of {value.bit_length()} bits, and Python reads at most "
        what += f"{_most_bits()} from JSON: pass it as text"
    else:
        what = f"is a {kind.__module__}.{kind.__qualname__}, which is not a JSON value (None, "
        what += "bool, int, float, str, list, dict)"
        what += ": pass a list" if isinstance(value, (tuple, set, frozenset)) else ""
    raise InvalidRequestError(f"{_shown(path)} {what}")


def _check_key(key: object, path: list[str | int]) -> None:
    if type(key) is not str or has_half_a_pair(key):
        raise InvalidRequestError(
            f"{_shown(path)} has the key {shown(key)} of type {type(key).__name__}; JSON keys are "
            "strings without halves of surrogate pairs"
        )


def _shown(path: list[str | int]) -> str:
    """Return a path as an error shows it, such as ``kwargs.a[1]``; long parts are cut off."""
    called, *steps = path
    text = "".join(
        f"[{step}]" if isinstance(step, int) else f".{redact_and_cut(step, _SHOWN)}"
        for step in steps
    )
    return f"{called}{redact_and_cut(text, _SHOWN)}"


def check_size(what: str, size: int, most: int) -> None:
    """Refuse an object that is larger than any object of its kind can be.

    Args:
        what: Name of the object in the error.
        size: Its size in bytes.
        most: The largest size allowed, in bytes.

    Raises:
        InvalidRequestError: The object is larger.
    """
    if size > most:
        raise InvalidRequestError(f"{what} is larger than {most} bytes, and is not read")


def read_bounded(file: _Readable, most: int, what: str) -> bytes:
    """Read a file or the body of an answer to its end.

    At most ``most`` bytes and one further piece are held in memory.

    Args:
        file: The file; ``read(n)`` returns at most n bytes, and no bytes at the end.
        most: The largest size allowed, in bytes.
        what: Name of the file in the error.

    Raises:
        InvalidRequestError: The file is larger; the rest of it is not read.
    """
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(min(_PIECE, most + 1 - size)):
        size += len(piece)
        check_size(what, size, most)
        pieces.append(piece)
    return b"".join(pieces)
