"""The last committed values of a model, which are put into it for a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._errors import SyncError
from .._model._loads import Loads
from ._synced_model import SyncedModel


class GlobalModel:
    """Puts the last committed values into a model, and gives the replica's own values back.

    May be entered again after it was left. Not thread-safe.

    Args:
        model: The model.
        loads: Notices values that are loaded into it, which these are not.
        check: Called before anything is changed; raises an error if the values cannot be read now.
    """

    def __init__(self, model: SyncedModel, loads: Loads, check: Callable[[], None]) -> None:
        self._model, self._loads, self._check = model, loads, check
        self._own: list[torch.Tensor] | None = None
        self._known = False  # whether only steps and syncs had changed the model

    def __enter__(self) -> None:
        self._check()
        self._known = self._loads.known()
        own = [named.tensor.detach().to("cpu", copy=True) for named in self._model.followed()]
        self._own = own
        try:
            with torch.no_grad():
                for named, values in self._model.committed():
                    named.tensor.copy_(values)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        own, self._own = self._own, None
        try:
            self._model.check()  # modules may have assigned new tensors to their buffers
        finally:
            with torch.no_grad():
                for named, values in zip(self._model.followed(), own or (), strict=True):
                    named.tensor.copy_(values)
        if self._known:
            self._loads.stepped()

    def refuse(self, what: str) -> None:
        """Refuse what needs the replica's own values in the model, while others are there.

        Raises:
            SyncError: They are.
        """
        if self._own is not None:
            raise SyncError(
                f"{what} came inside `with outer.global_model():`, while the model holds the last "
                "committed values in place of what this replica has learned since. Leave that "
                "block first"
            )
