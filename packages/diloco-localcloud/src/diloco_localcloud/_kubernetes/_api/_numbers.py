"""Numbers in the query of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .._objects import _refusals

_DIGITS = re.compile(r"[+-]?[0-9]+")


def whole(query: Mapping[str, str], name: str) -> int | None:
    """Return a parameter as an int64; None if it is not given.

    Raises:
        ApiError: 400, in the words of Go's ``strconv``.
    """
    text = query.get(name)
    if not text:
        return None
    if not _DIGITS.fullmatch(text):
        raise _refusals.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    digits = text.lstrip("+-0")
    if len(digits) > 19 or not -(2**63) <= int(text) < 2**63:
        raise _refusals.bad_request(f'strconv.ParseInt: parsing "{text}": value out of range')
    return int(text)
