"""Whether what is not synced still holds what the replicas had in common when they met."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import ModelChangedError
from ._memory import address
from ._values import checksum

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

# Bytes that are read at every sync, though nothing tells that they were changed: what is done to parameter.data leaves no
# trace. So this is found out a few syncs later, or at the end.
_READ_AT_ONCE = 2**24


class FrozenValues:
    """Remembers the values of frozen parameters by checksums, and looks at them again, a part at a time.

    A moving average, or a target network, that follows the trained parameters differs from replica to replica, and nothing
    ever brings it together again. Not thread-safe.

    Args:
        parameters: The frozen parameters by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._known: dict[str, str] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._turn: list[str] = []

    def remember(self, sums: Mapping[int, str | None]) -> None:
        """Take what they hold now as what they are to hold.

        Args:
            sums: Their checksums by the ``id`` of the tensor; None where the values cannot be read.
        """
        for name, parameter in self._parameters.items():
            value = sums.get(id(parameter))
            if value is not None:
                self._known[name] = value
                self._seen[name] = _trace(parameter)

    def check(self, *, everything: bool = False) -> None:
        """Look at those that were written to, and at some others in turn; or at all of them.

        Raises:
            ModelChangedError: One holds other values.
        """
        for name in self._known if everything else self._due():
            parameter = self._parameters[name]
            if checksum(parameter) != self._known[name]:
                raise ModelChangedError(
                    f"parameter {name!r} was frozen when the outer loop was made, and its values have been changed since. It is "
                    "not synced, so every replica would end with different values. Keep tensors that follow the trained "
                    "parameters (a moving average, a target network) outside the model, or in buffers, which are synced. Load "
                    "values before the block is entered.",
                    name,
                )
            self._seen[name] = _trace(parameter)

    def _due(self) -> list[str]:
        due = [name for name, seen in self._seen.items() if _trace(self._parameters[name]) != seen]
        room = _READ_AT_ONCE
        self._turn = self._turn or list(self._known)
        while self._turn and room > 0:
            name = self._turn.pop()
            parameter = self._parameters[name]
            size = parameter.numel() * parameter.itemsize
            if size <= _READ_AT_ONCE:  # larger ones would be felt; they are read at the end
                due.append(name)
                room -= size
        return due


def _trace(parameter: torch.Tensor) -> tuple[int, int]:
    """What changes when a parameter is written to, or gets other memory."""
    version = 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 - torch has no other way to ask for it
    return version, address(parameter)
