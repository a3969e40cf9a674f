"""What a replica's model has to hold after every sync, by the rules of delay and mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco_core._exchange._report import SyncReport

_TOLERANCE = 1e-5


class Mixing:
    """Compares the model of one life, one tensor per fragment, with what it should hold. Not thread-safe.

    Args:
        model: The parameters, of which each is a fragment.
        alpha: How much of its own values a replica keeps.

    Attributes:
        wrong: What was not as it should be.
        own: What the model holds: after the step that is about to be taken, until a sync is adopted.
        adopted: The newest sync that was adopted.
    """

    def __init__(self, model: Sequence[torch.Tensor], alpha: float) -> None:
        self.wrong: list[str] = []
        self._model = model
        self._alpha = alpha
        self._copies: list[torch.Tensor] = []
        self.own: list[torch.Tensor] = []
        self.adopted = 0

    def begin(self, copies: Sequence[torch.Tensor], sync: int) -> None:
        """The life begins with these global copies, after this sync."""
        self._copies = [copy.clone() for copy in copies]
        self.own, self.adopted = list(self._copies), sync

    def step(self) -> None:
        """The model is about to take a step of plain SGD with a learning rate of 1."""
        self.own = [
            tensor.detach().clone() - (0 if tensor.grad is None else tensor.grad)
            for tensor in self._model
        ]

    def synced(self, report: SyncReport, copies: Sequence[torch.Tensor], sync: int) -> None:
        """A sync was adopted, or was left out; these are the global copies now, after sync number ``sync``."""
        index, alpha = int(report.fragment), self._alpha
        wanted = list(self.own)
        old, new = self._copies[index], copies[index]
        if report.reloaded or report.batches_to_skip:
            wanted = [copy.clone() for copy in copies]
        elif report.committed:
            kept = {
                "counted": lambda: torch.lerp(new, self.own[index], alpha),
                "carried": lambda: torch.lerp(new, old, alpha) + self.own[index] - old,
            }
            wanted[index] = kept.get(report.contribution, new.clone)()
        for number, (tensor, values) in enumerate(zip(self._model, wanted, strict=True)):
            far = float((tensor.detach() - values).abs().max())
            if far > _TOLERANCE:
                self.wrong.append(
                    f"after sync {sync}, fragment {number} of its model is {far:.3g} off what {report} should have left"
                )
        self.own = [tensor.detach().clone() for tensor in self._model]
        self._copies, self.adopted = [copy.clone() for copy in copies], sync
