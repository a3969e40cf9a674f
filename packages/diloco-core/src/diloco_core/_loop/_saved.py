"""The saved state of a fixed run's outer loop: counters, global copy and outer state.

See :meth:`DiLoCo.state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._checks import kind_of
from .._errors import ConfigurationError
from .._exchange._base import Exchange
from .._exchange._schemas import MAY_CHANGE
from .._model._values import checksum
from .._outer._fragment import Fragment
from .._wire._sections import fingerprint
from . import _notices as notices
from ._counters import Counters
from ._synced_model import SyncedModel

STATE_VERSION = 4


@dataclass(eq=False)
class SavedState:
    """What an outer loop saves and loads. Not thread-safe.

    Args:
        model: The model, with the settings that must be the same on all replicas.
        optimizers: The inner optimizers.
        exchange: The exchange, whose rank and world size the state must be of.
        count: The inner and outer steps of this replica.

    Attributes:
        loaded: The state that was loaded, without the values of the fragments; None if none was.
    """

    model: SyncedModel
    optimizers: Sequence[torch.optim.Optimizer]
    exchange: Exchange
    count: Counters
    loaded: Mapping[str, Any] | None = field(default=None, init=False)

    def of(self) -> dict[str, Any]:
        """The state now."""
        state = {
            **self._identity(),
            "settings": dict(self.model.settings),
            "tensors": self.model.tensors(),
            "model": _model_checksums(self.model.fragments),
            **self.count.state_dict(),
            "has_inner_state": [bool(optimizer.state) for optimizer in self.optimizers],
            "fragments": [
                {
                    "copy": list(fragment.copy),
                    "outer": fragment.outer.state_dict(),
                    **({"residual": fragment.residual.values} if fragment.residual else {}),
                }
                for fragment in self.model.fragments
            ],
        }
        return {**state, "digest": digest_of(state)}

    def load(self, state: Any) -> None:
        """Continue from a saved state.

        Raises:
            ConfigurationError: It belongs to another replica, another model, or an outer loop with
                other settings, or it is not as it was saved. The message names the first
                difference.
        """
        self._check(state)
        saved = zip(state["fragments"], state["since_sync"], self.model.fragments, strict=True)
        for part, since_sync, fragment in saved:
            for copy, values in zip(fragment.copy, part["copy"], strict=True):
                copy.copy_(values)
            fragment.outer.load_state_dict(part["outer"])
            if fragment.residual is not None:
                fragment.residual.load(part["residual"], state["inner_steps"] - since_sync)
        self.count.load_state_dict(state)
        checks = ("model", "has_inner_state")
        self.loaded = {name: state[name].copy() for name in checks}

    def check_model(self) -> None:
        """Check that the model holds the values of the loaded state.

        Warns if an inner optimizer has lost its state.

        Raises:
            ConfigurationError: The model holds other values. The message names tensors that differ,
                and says what to load.
        """
        assert self.loaded is not None
        saved = self.loaded["model"]
        sums = _model_checksums(self.model.fragments)
        differing = [name for name in sums if sums[name] != saved.get(name)]
        if differing:
            raise ConfigurationError(
                "the model does not hold the values that it held when the state of this outer loop "
                f"was saved. These differ: {notices.some(differing)}. Before the block is entered, "
                "also load the states of the model (model.load_state_dict) and of the inner "
                "optimizer that were saved at the same moment."
            )
        had = zip(self.optimizers, self.loaded["has_inner_state"], strict=False)
        lost = [type(each).__name__ for each, had_state in had if had_state and not each.state]
        if lost:
            rank = self.exchange.rank
            notices.log.warning(notices.INNER_STATE_NOT_LOADED, rank, ", ".join(lost))

    def _check(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise ConfigurationError(
                "the saved state of an outer loop must be what DiLoCo.state_dict() returned, not "
                f"{kind_of(state)}"
            )
        for key, value in self._identity().items():
            _same(key, state.get(key), value)
        try:
            intact = state["digest"] == digest_of(state)
        except (AttributeError, KeyError, TypeError, ValueError):  # parts of the wrong kind
            intact = False
        if not intact:
            raise ConfigurationError(
                "the values in the saved state of the outer loop have changed since state_dict() "
                "returned them, or some are missing. They are references to the loop's own "
                "tensors, which further training changes: write the state to a file at once "
                "(torch.save) or copy it (copy.deepcopy). If that was done, the file is damaged; "
                "load another one."
            )
        for what, saved, current in (
            ("setting", state["settings"], self.model.settings),
            ("tensor", state["tensors"], self.model.tensors()),
        ):
            for key in [*current, *(key for key in saved if key not in current)]:
                if key not in MAY_CHANGE or what == "tensor":
                    _same(f"{what} {key!r}", saved.get(key, "absent"), current.get(key, "absent"))
        copies = [
            [[(copy.numel(), str(copy.dtype)) for copy in part] for part in parts]
            for parts in (
                [part["copy"] for part in state["fragments"]],
                [fragment.copy for fragment in self.model.fragments],
            )
        ]
        _same("order of tensors", *copies)

    def _identity(self) -> dict[str, int]:
        return {
            "version": STATE_VERSION,
            "rank": self.exchange.rank,
            "world_size": self.exchange.world_size,
        }


def digest_of(state: Mapping[str, Any]) -> str:
    """A digest of everything in a saved state except the digest itself."""
    parts = []
    for part in state["fragments"]:
        outer = part["outer"]
        ranges = [
            [[int(number) for number in entry["range"]], _checksums(entry["tensors"])]
            for entry in outer["ranges"]
        ]
        scalars = {name: float(value) for name, value in sorted(outer["scalars"].items())}
        # Without error feedback nothing is added, so that states of earlier versions have the
        # digest that they had.
        own = [name for name in ("copy", "residual") if name in part]
        values = {name: [checksum(each) for each in part[name]] for name in own}
        parts.append({**values, "ranges": ranges, "scalars": scalars})
    others = sorted((key, state[key]) for key in state if key not in {"fragments", "digest"})
    return fingerprint(others, parts)


def _checksums(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str | None]]:
    return [(name, checksum(tensor)) for name, tensor in sorted(tensors.items())]


def _model_checksums(fragments: Sequence[Fragment]) -> dict[str, str | None]:
    """A checksum of the model's values in every synced tensor, by the tensor's name."""
    return {each.name: checksum(each.tensor) for one in fragments for each in one.followed()}


def _same(what: str, saved: object, current: object) -> None:
    if saved != current:
        if str(saved) == str(current):  # such as 2 and '2'
            saved = f"{saved!r} ({kind_of(saved)})"
            current = f"{current!r} ({kind_of(current)})"
        raise ConfigurationError(
            f"the saved state does not fit this outer loop: {what} is {saved} in the saved state, "
            f"but {current} in this outer loop. Load a state that this rank has saved with the "
            "same model, the same settings and the same version."
        )
