"""Answers in pages."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, TypeVar

from .._model._refused import invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .._model._refused import RefusedError

Item = TypeVar("Item")


def page(
    items: Sequence[Item],
    size: int,
    token: str | None,
    refusal: Callable[[str], RefusedError] = invalid,
) -> tuple[Sequence[Item], str | None]:
    """One page, and the token of the next; None after the last.

    Raises:
        RefusedError: the token is none of ours; made by ``refusal``.
    """
    begin = 0 if token is None else _read(token, refusal)
    end = begin + size
    return items[begin:end], _write(end) if end < len(items) else None


def _write(place: int) -> str:
    return base64.urlsafe_b64encode(f"page-{place}".encode()).decode()


def _read(token: str, refusal: Callable[[str], RefusedError]) -> int:
    try:
        word, _, place = base64.urlsafe_b64decode(token).decode().partition("-")
        if word == "page":
            return int(place)
    except (binascii.Error, UnicodeDecodeError, ValueError):
        pass
    raise refusal("Invalid pagination token.")
