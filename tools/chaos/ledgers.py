"""Ledgers: tensors of the model that show which batches of which rank were learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arithmetic import Vector
    from findings import Findings


class Ledgers:
    """The ledgers of one fragment.

    Args:
        table: The fragment, as the manifest has it.
        findings: What is wrong is added to these.
    """

    def __init__(self, table: dict[str, Any], findings: Findings) -> None:
        self._findings = findings
        self._tensors = [tensor for tensor in table["tensors"] if tensor["name"].endswith("ledger")]
        # What the global ledgers must hold under plain averaging.
        self._totals = {tensor["name"]: np.zeros(tensor["shape"]) for tensor in self._tensors}

    def add(self, members: list[dict[str, Any]]) -> None:
        """A sync counts for every batch of every member the mean's part of it."""
        for values in self._totals.values():
            for member in members:
                batches = np.arange(member["from"], member["to"]) % values.shape[1]
                np.add.at(values[member["rank"]], batches, 1 / len(members))

    def take_back(self, whole: Sequence[list[Vector]], counted: Sequence[list[Vector]]) -> None:
        """What was lost of contributions counts for nothing."""
        for given, kept in zip(whole, counted, strict=True):
            pairs = zip(self._ledgers(given), self._ledgers(kept), strict=True)
            for (ledger, whole_values), (_, kept_values) in pairs:
                self._totals[ledger] += (whole_values - kept_values) / len(counted)

    def check(self, member: dict[str, Any], contribution: list[Vector]) -> None:
        """A contribution holds exactly the batches that it counts."""
        for ledger, values in self._ledgers(contribution):
            expected = np.zeros(values.shape)
            np.subtract.at(
                expected[member["rank"]],
                np.arange(member["from"], member["to"]) % values.shape[1],
                1,
            )
            self._findings.expect(
                "ledgers of contributions",
                bool(np.abs(values - expected).max() < 1e-6),
                f"{member['key']} claims the batches {member['from']} to {member['to']}, but was "
                f"made from others ({ledger}: {_differences(values, expected)})",
            )

    def check_global(self, sync: int, groups: list[Vector], settings: dict[str, str]) -> None:
        """With plain averaging the global ledger is the sum of what counted, each batch once."""
        if float(settings["outer_lr"]) != 1.0 or float(settings["outer_momentum"]) != 0.0:
            return
        for ledger, values in self._ledgers(groups):
            expected = self._totals[ledger]
            self._findings.expect(
                "global ledgers",
                bool(np.abs(values - expected).max() < 1e-6),
                f"after sync {sync} the global {ledger} does not hold every counted batch once: "
                f"{_differences(values, expected)}",
            )

    def _ledgers(self, groups: list[Vector]) -> list[tuple[str, Vector]]:
        """Name and values of every ledger, out of the flat groups of the fragment."""
        found = []
        for tensor in self._tensors:
            start, shape = tensor["start"], tensor["shape"]
            values = groups[tensor["group"]][start : start + int(np.prod(shape))]
            found.append((tensor["name"], values.reshape(shape)))
        return found


def _differences(values: Vector, expected: Vector) -> str:
    """The first elements that differ."""
    places = np.argwhere(np.abs(values - expected) >= 1e-6)[:5]
    text = ", ".join(
        f"({r}, {b}) is {values[r, b]:.3g} instead of {expected[r, b]:.3g}" for r, b in places
    )
    return f"{text} and so on" if len(places) == 5 else text
