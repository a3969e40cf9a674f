"""The options of an outer loop as one object: made once, compared once, recorded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch

from .._codecs._codec import Codec
from .._codecs._plain import PLAIN
from ._schedule import Schedule, Windows

_EVERY_STEP = Schedule(1, 1)


class Weighting(StrEnum):
    """A measure by which contributions are weighed."""

    EQUAL = "equal"
    """All count the same."""
    STEPS = "steps"
    """By the inner steps that they cover."""
    TOKENS = "tokens"
    """By tokens squared over inner steps, as in Decoupled DiLoCo."""


class OuterGroup(NamedTuple):
    """Say how one outer parameter group is stepped.

    Attributes:
        factory: Makes its optimizer.
        schedule: Its learning rate as a function of the sync; None if it is constant.
    """

    factory: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    schedule: Callable[[int], float] | None = None


class StateCoding(NamedTuple):
    """Say how published state is encoded.

    Attributes:
        codec: The codec.
        full_every: Every so many syncs of a fragment, its values are published whole.
    """

    codec: Codec
    full_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Hold what the replicas of a run agree on about their syncs.

    An option of the outer loop is a field here. :func:`.make_terms` checks what the user passed,
    :attr:`settings` is what replicas compare and the manifest records, and the code that
    carries out a sync finds the terms in its job.

    Attributes:
        schedule: When fragments are sent and adopted: ``sync_every``, the number of fragments,
            delay and alpha.
        codec: How contributions are sent.
        feedback: The decay of error feedback; 0 without it.
        weighting: By what contributions are weighed.
        trim: How many of the largest, and of the smallest, values are left out in every element of
            what takes an outer step.
        clip: Whether contributions are clipped to the median of their norms.
        coding: How the state is published if it is encoded; None if values and outer state are
            published as they are.
        groups: How the outer parameter groups are stepped.
        buffers: What happens to buffers: ``"mean"``, ``"rank0"`` or ``"none"``.
        init: ``"rank0"``, or ``"check"``: differing initial values are refused.
        flush: What happens to a partial period when the block is left: ``"partial"``: it is synced;
            ``"none"``: it is dropped.
    """

    schedule: Schedule | Windows = _EVERY_STEP
    codec: Codec = PLAIN
    feedback: float = 0.0
    weighting: Weighting = Weighting.EQUAL
    trim: int = 0
    clip: bool = False
    coding: StateCoding | None = None
    groups: tuple[OuterGroup, ...] = ()
    buffers: str = "mean"
    init: str = "rank0"
    flush: str = "partial"

    @property
    def settings(self) -> dict[str, str]:
        """All settings but those of outer groups, by the names under which replicas compare them.

        The optimizers of outer groups know their own. What is as by default is left out, so that an
        option that is new changes nothing in the runs without it.
        """
        settings = {
            "sync_every": str(self.schedule.sync_every),
            "fragments": str(self.schedule.fragments),
            "buffers": self.buffers,
            "init": self.init,
            "flush": self.flush,
            **self.schedule.settings,
        }
        if not self.codec.plain:
            settings["codec"] = self.codec.name
        if self.feedback:
            settings["error_feedback"] = repr(self.feedback)
        if self.weighting is not Weighting.EQUAL:
            settings["weight"] = str(self.weighting)
        if self.trim:
            settings |= {"aggregate": "trimmed", "trim": str(self.trim)}
        if self.clip:
            settings["clip"] = "median"
        if self.coding is not None:
            settings["state_codec"] = self.coding.codec.name
            settings["full_state_every"] = str(self.coding.full_every)
        return settings

    @property
    def of_initial_values(self) -> Terms:
        """Return the terms of the sync in which all replicas take the values of rank 0.

        Contributions are neither weighed nor cut.
        """
        return replace(self, weighting=Weighting.EQUAL, trim=0, clip=False, coding=None)


DEFAULT = Terms()
"""Plain means of values as they are in memory."""
