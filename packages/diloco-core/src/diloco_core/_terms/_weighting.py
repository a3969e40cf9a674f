"""By what the contributions to a sync are weighed."""

from __future__ import annotations

from enum import StrEnum


class Weighting(StrEnum):
    """By what contributions are weighed."""

    EQUAL = "equal"
    """All count the same."""
    STEPS = "steps"
    """By the inner steps that they cover."""
    TOKENS = "tokens"
    """By tokens squared over inner steps, as in Decoupled DiLoCo."""
