"""Results as they come back: R11."""

from __future__ import annotations

from typing import Any

import pytest

from ._check_collect import collect
from ._harness import Step
from ._lab import Lab


def nested(depth: int) -> Any:
    """Return lists and dicts within each other."""
    value: Any = "the bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"down": value}
    return value


DIFFICULT: list[Any] = [
    {"a": 1, "A": 2, "ä": 3, "Ä": 4, "a ": 5, " a": 6, "": 7},
    {"trailing ": "blanks  ", "lines": "a\nb\r\n", "last": "\n"},
    [2**53 + 1, -(2**63) - 1, 10**400, 0, -1],
    [1, 1.0, True, "1", 0, 0.0, False, "", None, [], {}],
    [0.1, 1e308, 5e-324, -1.5, 1e16, 123456789.123456789],
    nested(150),
    1.0,
    "e\u0301 is not \xe9",
    "naïve 漢字 🙂 \0 \x1b[0m $(HOME) $$ \" ' \\ \u2028",
    {f"key {number}": number for number in range(500)},
]


class Results:
    """Fixed tests of R11."""

    def test_r11_results_arrive_as_they_were_returned(self, lab: Lab) -> None:
        """Return keys that differ in case or blanks, deep nesting, and integers of any size."""
        with lab.part_of("R11"):
            for value in DIFFICULT:
                replica = lab.up().replicas[0]
                lab.drive(replica, Step.SUCCEED, value)
                collect(lab, [replica])
            lab.forget()
            collect(lab, lab.replicas())

    def test_r11_the_declared_size_is_the_limit(self, lab: Lab) -> None:
        """Check that a result of this size arrives; one byte more is a failure with both sizes."""
        most = lab.capabilities.max_result_bytes
        if most is None:
            pytest.skip("the backend declares no limit")
        with lab.part_of("R11"):
            run = lab.up(1)
            lab.drive(run.replicas[0], Step.SUCCEED, "x" * (most - 2))
            collect(lab, run.replicas, timeout=8.0)
        other = lab.up(1)
        lab.overfill(other.replicas[0], "x" * (most - 1))
        (entry,) = collect(lab, other.replicas, timeout=8.0)
        numbers = (str(most + 1), str(most))
        text = str(entry["error"]).replace(",", "").replace("_", "")
        if not all(number in text for number in numbers):
            lab.broken("R11", f"error={entry['error']!r}", f"it had {numbers[0]} bytes of {most}")
