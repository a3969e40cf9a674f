"""Answers that are split into pages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from .._model._refused import RefusedError, invalid

Item = TypeVar("Item")
T = TypeVar("T")
Key = tuple[str, str] | tuple[float, str]


def page(
    items: Sequence[Item],
    size: int,
    token: str | None,
    refusal: Callable[[str], RefusedError] = invalid,
) -> tuple[Sequence[Item], str | None]:
    """Return one page, and the token of the next page (None after the last).

    Raises:
        RefusedError: the token was not made here; the error is made by ``refusal``.
    """
    begin = 0 if token is None else _read(token, int, refusal)
    end = begin + size
    return items[begin:end], _write(end) if end < len(items) else None


def page_behind(
    items: Sequence[Item], keys: Sequence[Key], size: int, token: str | None, *, falling: bool
) -> tuple[Sequence[Item], str | None]:
    """Return one page of a list that changes between requests, and the token of the next page.

    It does what :func:`page` does, but the next page begins behind the last item of this one.

    Args:
        items: The items, in the order of their keys.
        keys: The key of each item: a moment or a text, and a name.
        size: The size of a page.
        token: The token that came with the page before.
        falling: Whether the keys fall.

    Raises:
        RefusedError: the token was not made here.
    """
    if token is None:
        begin = 0
    else:
        kind, name = _read(token, list, invalid)
        last = (kind, name)
        begin = sum((key >= last) if falling else (key <= last) for key in keys)
    end = begin + size
    return items[begin:end], _write(list(keys[end - 1])) if end < len(items) else None


def _write(place: int | list[str | float]) -> str:
    return base64.urlsafe_b64encode(json.dumps({"behind": place}).encode()).decode()


def _read(token: str, kind: type[T], refusal: Callable[[str], RefusedError]) -> T:
    try:
        place = json.loads(base64.urlsafe_b64decode(token))["behind"]
        if isinstance(place, kind):
            return place
    except (binascii.Error, UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise refusal("Invalid pagination token.")
