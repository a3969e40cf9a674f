"""The learning rate of an outer step: what a replica asks for, and which rate a sync takes."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

DIGITS = "(?:[0-9a-f]{16})"
_TEXT = re.compile(rf"(\d{{1,9}})-(\d{{1,5}})-({DIGITS}+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rate:
    """The outer learning rate of a sync, and where it comes from.

    Attributes:
        values: One for each parameter group of the outer optimizer; empty without an outer step.
        number: How many times the rate had been changed by ``set_outer_lr`` in the run: 0 as long
            as it is what the outer loop was made with.
        rank: The rank that asked for this rate; 0 if none has.
        epoch: The incarnation of that rank in elastic runs; 0 otherwise.
    """

    values: tuple[float, ...] = ()
    number: int = 0
    rank: int = 0
    epoch: int = 0

    @property
    def text(self) -> str:
        """The rate as a part of a key or a header; empty if there is no outer step.

        The epoch is not in it.
        """
        return f"{self.number}-{self.rank}-{digits(self.values)}" if self.values else ""

    @classmethod
    def parse(cls, text: str) -> Rate | None:
        """The rate that :attr:`text` describes; None if it describes none."""
        if not text:
            return cls()
        match = _TEXT.fullmatch(text)
        values = None if match is None else values_of(match[3])
        if match is None or values is None:
            return None
        rate = cls(values, int(match[1]), int(match[2]))
        return rate if rate.text == text else None


NO_RATE = Rate()
"""The rate of a sync without an outer step, and of a run before its first one."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Hold what a replica proposes for its next sync.

    Attributes:
        standing: The rate of the sync if no replica asks for another one.
        wish: The learning rates that this replica asks for; empty if it asks for nothing.
        of_sync: Whether the standing rate is what a function of this replica returns for the sync:
            other replicas may have other functions.
    """

    standing: Rate = NO_RATE
    wish: tuple[float, ...] = ()
    of_sync: bool = False

    def rate(self, rank: int) -> Rate:
        """Return the rate that the replica asks for; if it asks for none, the standing one."""
        return Rate(self.wish, self.standing.number + 1, rank) if self.wish else self.standing


def chosen(rates: Iterable[Rate]) -> Rate:
    """Return the rate that a sync takes: the one with the greatest number.

    Of several rates with this number, it is the one that the greatest rank asked for.

    Args:
        rates: What the replicas propose, in rank order: of rates that no replica asked for, the
            first one counts.
    """
    return max(rates, key=lambda rate: (rate.number, rate.rank, rate.epoch))


def digits(values: Iterable[float]) -> str:
    """Return the exact values of learning rates, with 16 hexadecimal digits for each.

    The digits are those of an IEEE 754 double, big-endian.
    """
    numbers = list(values)
    return struct.pack(f">{len(numbers)}d", *numbers).hex()


def values_of(text: str) -> tuple[float, ...] | None:
    """The learning rates that have these digits; None if one of them is not a positive number."""
    values = struct.unpack(f">{len(text) // 16}d", bytes.fromhex(text))
    return values if all(0 < value < math.inf for value in values) else None
