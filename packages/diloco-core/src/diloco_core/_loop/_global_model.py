"""The last committed values of a model, which are put into it for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from .._errors import SyncError
from .._model._loads import Loads
from ._synced_model import SyncedModel


class GlobalModel:
    """Puts the last committed values into a model, and gives the replica's own values back.

    Not thread-safe.

    Args:
        model: The model.
        loads: Notices values that are loaded into it, which these are not.
    """

    def __init__(self, model: SyncedModel, loads: Loads) -> None:
        self._model, self._loads = model, loads
        self._in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model hold the last committed values as long as this lasts."""
        self.refuse("global_model()")
        known = self._loads.known()
        own = [named.tensor.detach().to("cpu", copy=True) for named in self._model.followed()]
        self._in_place = True
        try:
            self._write(values for _, values in self._model.committed())
            yield
        finally:
            self._in_place = False
            try:
                self._model.check()  # modules may have assigned new tensors to their buffers
            finally:
                self._write(own)
            if known:
                self._loads.stepped()

    def refuse(self, what: str) -> None:
        """Refuse what needs the replica's own values in the model, while others are there.

        Raises:
            SyncError: They are.
        """
        if self._in_place:
            raise SyncError(
                f"{what} came inside `with outer.global_model():`, where the model does not hold "
                "what this replica has learned. Leave that block first"
            )

    @torch.no_grad()
    def _write(self, values: Iterable[torch.Tensor]) -> None:
        for named, each in zip(self._model.followed(), values, strict=True):
            named.tensor.copy_(each)
