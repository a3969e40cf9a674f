"""What a reader of a run has checked, and what it has found wrong."""

from __future__ import annotations

from collections import Counter

_MOST = 100


class Findings:
    """Counts checks, and keeps what is wrong.

    Attributes:
        counts: How often each thing was checked.
        violations: What is wrong, a sentence each; only the first hundred.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def add(self, text: str) -> None:
        """Note that something is wrong."""
        if len(self.violations) < _MOST:
            self.violations.append(text)

    def expect(self, what: str, holds: bool, text: str) -> None:
        """Count a check of this kind; ``text`` says what is wrong if it does not hold."""
        self.counts[what] += 1
        if not holds:
            self.add(text)
