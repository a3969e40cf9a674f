"""Saving the state of an outer loop, and continuing from it; see :meth:`DiLoCo.state_dict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._state import (
    STATE_VERSION,
    check_model,
    check_saved,
    digest_of,
    load_fragments,
    model_checksums,
    warn_of_lost_inner_state,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from .._exchange._base import Exchange
    from ._counters import Counters
    from ._synced_model import SyncedModel


class SavedState:
    """What an outer loop saves and loads. Not thread-safe.

    Args:
        model: The model.
        optimizers: The inner optimizers.
        exchange: The exchange, whose rank and world size the state must be of.
        settings: The settings that must be the same on all replicas.
        count: The inner and outer steps of this replica.

    Attributes:
        loaded: Whether a state has been loaded.
    """

    def __init__(
        self,
        model: SyncedModel,
        optimizers: Sequence[torch.optim.Optimizer],
        exchange: Exchange,
        settings: Mapping[str, str],
        count: Counters,
    ) -> None:
        self.loaded = False
        self._model = model
        self._optimizers = optimizers
        self._settings = settings
        self._count = count
        self._exchange = exchange
        self._values: dict[str, str | None] = {}
        self._had_inner_state: list[bool] = []

    def of(self, stepped: Sequence[int]) -> dict[str, Any]:
        """The state now. ``stepped`` names the inner optimizers that have stepped in the inner step under way."""
        state = {
            **self._identity(),
            "settings": dict(self._settings),
            "tensors": self._model.tensors(),
            "model": model_checksums(self._model.fragments),
            **self._count.state_dict(),
            "stepped": stepped,
            "has_inner_state": [bool(optimizer.state) for optimizer in self._optimizers],
            "fragments": [
                {
                    "copy": list(fragment.copy),
                    "outer": outer.state_dict(),
                    **({"residual": fragment.residual.values} if fragment.residual else {}),
                }
                for fragment, outer in self._model.pairs()
            ],
        }
        return {**state, "digest": digest_of(state)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ConfigurationError: It does not fit this loop; see :func:`._state.check_saved`.
        """
        check_saved(state, self._identity(), self._settings, self._model.fragments)
        load_fragments(state, self._model.pairs())
        self._values = dict(state["model"])
        self._had_inner_state = list(state["has_inner_state"])
        self._count.load_state_dict(state)
        self.loaded = True

    def check_model(self) -> None:
        """Check that the model holds the values of the loaded state; warn if an inner optimizer has lost its state.

        Raises:
            ConfigurationError: The model holds other values.
        """
        check_model(self._model.fragments, self._values)
        warn_of_lost_inner_state(self._had_inner_state, self._optimizers, self._exchange.rank)

    def _identity(self) -> dict[str, int]:
        return {
            "version": STATE_VERSION,
            "rank": self._exchange.rank,
            "world_size": self._exchange.world_size,
        }
