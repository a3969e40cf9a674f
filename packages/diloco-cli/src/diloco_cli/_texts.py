"""Text that is safe to print, and text that people type: pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from itertools import dropwhile, groupby

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import readable, redact_and_cut, shown

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_FEW = 8  # ranks that are named one by one
CLOCK = 60.0
"""Seconds by which clocks may differ without a word."""


def clean(text: str, most: int = 1000) -> str:
    r"""Return a text of a replica, backend or user as one line: no secrets, no control codes.

    >>> clean("all is well\x1b[2J\nreally, password=hunter2")
    'all is well\\x1b[2J\\nreally, password=<redacted>'
    """
    return readable(redact_and_cut(text, most)).replace("\n", "\\n").replace("\t", "\\t")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> duration(3.4), duration(200), duration(90_061)
    ('3s', '3m 20s', '1d 1h')
    """
    left = max(0, int(seconds))
    counts = {"d": left // 86_400, "h": left // 3600 % 24, "m": left // 60 % 60, "s": left % 60}
    largest = list(dropwhile(lambda pair: not pair[1], counts.items()))[:2]
    return " ".join(f"{count}{unit}" for unit, count in largest if count) or "0s"


def read_moment(text: str, now: float) -> float:
    """Return the Unix time that ``--since`` means.

    Args:
        text: A duration before now, such as ``10m`` (units s, m, h and d), a date, or a date with a
            time; without a time zone, they are local.
        now: The current Unix time.

    Raises:
        InvalidRequestError: The text is something else.
    """
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text, re.ASCII):
        return now - float(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidRequestError(
            f"--since {shown(text)} is not a time: give how long ago, such as 90s, 10m, 2h or 1d, "
            "or a date or time such as 2026-03-14T15:09"
        ) from None


def read_ranks(texts: Iterable[str], known: Iterable[int]) -> list[int]:
    """Return the ranks that ``--rank`` means, ascending; all if nothing was given.

    Args:
        texts: Ranks and ranges, such as ``0,2,5-7``.
        known: The ranks of the run.

    Raises:
        InvalidRequestError: A text is something else, or the run has no such rank.
    """
    ranks = sorted(known)
    wanted: set[int] = set()
    for part in [part.strip() for text in texts for part in text.split(",")]:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise InvalidRequestError(
                f"--rank {shown(part)} is not a rank: give numbers and ranges, such as 0,2,5-7"
            )
        chosen = [rank for rank in ranks if first <= rank <= last]
        if len(chosen) != last - first + 1:
            raise InvalidRequestError(
                f"--rank {shown(part)}: the run has the ranks {in_ranges(ranks)} here"
            )
        wanted.update(chosen)
    return sorted(wanted) if wanted else ranks


def in_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as people write them.

    >>> in_ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    places = enumerate(sorted(ranks))  # ranks that follow each other are as far from their places
    groups = groupby(places, lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in span] for _, span in groups]
    return ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else f"{span[0]}" for span in spans)


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ranks as the subject of a sentence.

    >>> ranks_in_words([3]), ranks_in_words([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    return f"rank{'s' * (len(ranks) > 1)} {in_ranges(ranks)}"


def clocks_in_words(off: Mapping[int, float]) -> str:
    """Return which ranks have clocks that are off, and by how many seconds at most.

    >>> clocks_in_words({1: 3.0, 2: -7200.0})
    'of 1-2, by up to 2h behind'
    """
    most = max(off.values(), key=abs)
    ranks = in_ranges(off) if len(off) <= _FEW else f"{len(off)} ranks"
    return f"of {ranks}, by up to {duration(abs(most))} {'ahead' if most > 0 else 'behind'}"


def number(value: float) -> str:
    """Return a number in at most four digits, as people write it.

    >>> number(0.12345), number(1500), number(2_500_000), number(12)
    ('0.1235', '1.5k', '2.5M', '12')
    """
    size, unit = next((pair for pair in _SIZES if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / size:.4g}{unit}"
