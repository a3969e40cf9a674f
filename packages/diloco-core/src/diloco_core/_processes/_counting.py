"""The optimizer of a twin, which only counts the steps that the processes have taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class CountingOptimizer(torch.optim.Optimizer):
    """Stands for the inner optimizers of a replica's processes: a step changes nothing.

    Args:
        parameters: The parameters of the twin.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Count one step: the hooks of the outer loop are called."""
