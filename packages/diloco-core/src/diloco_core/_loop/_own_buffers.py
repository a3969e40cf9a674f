"""The buffers of a model that are not synced: with ``buffers="none"`` each rank has its own, and saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._model._names import plain_name
from .._model._values import as_bytes, named_buffers

if TYPE_CHECKING:
    from collections.abc import Mapping


class OwnBuffers:
    """Saved and restored as an object with a state; see :class:`.Stateful`. Not thread-safe.

    Args:
        model: The model. Its modules may assign new tensors to their buffers at any time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Every persistent buffer as bytes, by its name in the plain model."""
        return {name: as_bytes(buffer) for name, buffer in self._buffers().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers to the saved values.

        Raises:
            ValueError: Other buffers were saved than the model has now.
        """
        buffers = self._buffers()
        sizes = {name: buffer.nbytes for name, buffer in buffers.items()}
        saved = {name: values.numel() for name, values in state.items()}
        if saved != sizes:
            raise ValueError(f"buffers of these sizes in bytes were saved: {saved}; not {sizes}")
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(state[name].view(buffer.dtype).view(buffer.shape))

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers = named_buffers(self._model, persistent=True)
        return {plain_name(self._model, name): buffer for name, buffer in buffers.items()}
