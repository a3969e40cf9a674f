"""The last committed values of a model, which are put into it for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from .._errors import SyncError
from .._model._loads import Loads
from .._model._values import part_here


class GlobalModel:
    """Puts the last committed values into a model, and gives the replica's own values back.

    Not thread-safe.

    Args:
        synced: Returns the tensors that are synced, as they are in the model now.
        put: Writes the last committed values into the model.
        check: Refuses a model whose tensors are no longer the synced ones.
        loads: Notices values that are loaded into the model, which these are not.

    Attributes:
        is_in_place: Whether the model holds the last committed values now.
    """

    def __init__(
        self,
        synced: Callable[[], Iterable[torch.Tensor]],
        put: Callable[[], None],
        check: Callable[[], object],
        loads: Loads,
    ) -> None:
        self._synced, self._put, self._check, self._loads = synced, put, check, loads
        self.is_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model hold the last committed values as long as this lasts."""
        self.refuse("global_model()")
        known = self._loads.known()
        own = [part_here(each.detach()).to("cpu", copy=True) for each in self._synced()]
        self.is_in_place = True
        try:
            self._put()
            self._loads.pause()
            yield
        finally:
            self.is_in_place = False
            try:
                self._check()  # modules may have assigned new tensors to their buffers
            finally:
                for tensor, values in zip(self._synced(), own, strict=True):
                    part_here(tensor.detach()).copy_(values)
            if known:
                self._loads.stepped()

    def refuse(self, what: str) -> None:
        """Refuse what needs the replica's own values in the model, while others are there.

        Raises:
            SyncError: They are.
        """
        if self.is_in_place:
            raise SyncError(
                f"{what} came inside `with outer.global_model():`, where the model does not hold "
                "what this replica has learned. Leave that block first"
            )
