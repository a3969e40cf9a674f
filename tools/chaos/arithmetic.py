"""Outer steps again, in float64: the mean of contributions in rank order, and torch's SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Vector = np.ndarray[Any, Any]

_ROUNDINGS = 16
"""Units in the last place by which a value may be off: every sum, mean and step is rounded."""


@dataclass
class State:
    """A fragment after a sync.

    Attributes:
        values: Flat values of every group.
        momentum: Flat momentum of the groups that take outer steps; empty before the first step.
        residual: What the updates until now have lost, where they are published encoded.
        slack: By how much encoding may have changed the momentum (``"momentum_buffer"``) and the
            residual (``"update_residual"``) of a group, element by element.
    """

    values: list[Vector]
    momentum: dict[int, Vector] = field(default_factory=dict)
    residual: dict[int, Vector] = field(default_factory=dict)
    slack: dict[tuple[str, int], Vector] = field(default_factory=dict)


def decode_int8(data: Vector) -> Vector:
    """The values of the codec int8: blocks of 256, each a float32 scale and a byte per value."""
    rows = [data[start : start + 260] for start in range(0, len(data), 260)]
    parts = [row[4:].view(np.int8) * row[:4].view(np.float32) for row in rows]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def int8_slack(decoded: Vector) -> Vector:
    """By how much the encoded values may differ: half a step of 1/127 of the block's largest.

    A block has 256 values.
    """
    largest = [
        np.full(len(block), np.abs(block).max(), np.float64)
        for block in (decoded[start : start + 256] for start in range(0, len(decoded), 256))
    ]
    return np.concatenate(largest) / 253 if largest else np.zeros(0)


def outer_step(
    state: State,
    contributions: Sequence[Sequence[Vector]],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, str],
) -> tuple[State, list[Vector]]:
    """The state after a sync, and for every group each element's largest intermediate value.

    What encoding has lost until now is added to the values, and nothing is lost again.

    Args:
        state: The state before.
        contributions: Flat values of every group, member by member in rank order.
        groups: The groups' rules, as the manifest has them.
        settings: The outer optimizer's, as the manifest has them.
    """
    if settings["outer_optimizer"] != "SGD":
        raise NotImplementedError(
            f"outer steps of {settings['outer_optimizer']} are not recomputed"
        )
    lr, momentum = float(settings["outer_lr"]), float(settings["outer_momentum"])
    nesterov = settings["outer_nesterov"] == "True"
    after, scales = State([]), []
    for index, group in enumerate(groups):
        parts = [contribution[index] for contribution in contributions]
        if group["rule"] == "first":
            after.values.append(parts[0])
            scales.append(np.zeros(len(parts[0])))
            continue
        wide = [part.astype(np.float64) for part in parts]
        mean = sum(wide) / len(wide)
        scale = np.nan_to_num(sum(map(np.abs, wide)), posinf=0.0)
        if group["rule"] == "outer":
            values = state.values[index].astype(np.float64)
            buffer = mean
            if momentum and index in state.momentum:
                buffer = momentum * state.momentum[index].astype(np.float64) + mean
            if momentum:
                after.momentum[index] = buffer
            step = lr * (mean + momentum * buffer if nesterov else buffer)
            scale = scale + np.abs(values) + np.abs(buffer) + np.abs(step)
            after.values.append(values - step + state.residual.get(index, 0.0))
        else:
            after.values.append(mean)
        scales.append(scale)
    return after, scales


def disagreement(
    computed: Vector, published: Vector, scale: Vector, steps: int, slack: Vector | float = 0.0
) -> float:
    """By how much the worst element is further off than rounding explains (1: just explained).

    Args:
        computed: In float64.
        published: In its own dtype.
        scale: Size of the largest intermediate value of each element.
        steps: Outer steps since values were last compared.
        slack: What an element may be off besides.
    """
    if computed.shape != published.shape:
        return float("inf")
    if not np.issubdtype(published.dtype, np.floating):
        return 0.0 if np.array_equal(computed, published) else float("inf")
    unit = np.finfo(published.dtype)
    allowed = _ROUNDINGS * steps * (unit.eps * scale + unit.tiny)
    mine, theirs = computed.astype(np.float64), published.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus itself; buffers may hold it
        off = np.where(mine == theirs, 0.0, np.abs(theirs - mine)) / (allowed + slack)
    return float(off.max(initial=0.0)) if np.isfinite(off).all() else float("inf")
