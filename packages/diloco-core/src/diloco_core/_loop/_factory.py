"""A function that makes an outer loop with the usual settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._connect import connect
from .._exchange._base import Exchange
from .._seconds import Seconds
from ._diloco import DiLoCo


def make_diloco_outer_loop(
    model: torch.nn.Module,
    inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    exchange: Exchange | None = None,
    *,
    sync_every: int | Seconds = 500,
    **options: Any,
) -> DiLoCo:
    """Make an outer loop with the usual settings.

    They are H = 500, and as outer optimizer SGD with Nesterov momentum, lr 0.7 and momentum 0.9.

    Args:
        model: The model.
        inner_optimizer: The optimizer that the training loop steps, or several.
        exchange: The connection to the other replicas; if left out, what :func:`connect` returns
            without arguments.
        sync_every: Inner steps between two syncs of the same fragment; or :class:`Seconds`.
        **options: Further arguments of :class:`DiLoCo`.
    """
    if exchange is None:
        exchange = connect()
    return DiLoCo(model, inner_optimizer, exchange, sync_every=sync_every, **options)
