"""Checking that unsynced parameters still hold what the replicas had in common when they met."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._errors import ModelChangedError
from ._memory import address
from ._values import checksum

# Bytes that are read at every sync although nothing shows that they were changed, since a change
# through parameter.data leaves no trace. Such a change is found a few syncs later, or at the end.
_READ_AT_ONCE = 2**24


class FrozenValues:
    """Checksums of frozen parameters, compared later with the values, some parameters at a time.

    For example, a moving average or a target network that follows the trained parameters differs
    between the replicas, and no sync ever makes it equal again. Not thread-safe.

    Args:
        parameters: The frozen parameters by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._checksums: dict[str, str] = {}
        self._traces: dict[str, tuple[int, int]] = {}
        self._next_names: list[str] = []

    def remember(self, sums: Mapping[int, str | None]) -> None:
        """Remember the present values of the parameters, which are to stay as they are.

        Args:
            sums: Their checksums by the ``id`` of the tensor; None if its values cannot be read.
        """
        for name, parameter in self._parameters.items():
            value = sums.get(id(parameter))
            if value is not None:
                self._checksums[name] = value
                self._traces[name] = _trace(parameter)

    def check(self, *, everything: bool = False) -> None:
        """Compare the parameters that were written to, and some others in turn, or ``everything``.

        Raises:
            ModelChangedError: The values of a parameter have changed.
        """
        for name in self._checksums if everything else self._due():
            parameter = self._parameters[name]
            if checksum(parameter) != self._checksums[name]:
                raise ModelChangedError(
                    f"parameter {name!r} was frozen when the outer loop was made, and its values "
                    "have been changed since. It is not synced, so every replica would end with "
                    "different values. Keep tensors that follow the trained parameters (a moving "
                    "average, a target network) outside the model, or in buffers, which are "
                    "synced. If you have loaded values, do that before the block is entered.",
                    name,
                )
            self._traces[name] = _trace(parameter)

    def _due(self) -> list[str]:
        due = [
            name for name, trace in self._traces.items() if _trace(self._parameters[name]) != trace
        ]
        room = _READ_AT_ONCE
        self._next_names = self._next_names or list(self._checksums)
        while self._next_names and room > 0:
            name = self._next_names.pop()
            parameter = self._parameters[name]
            size = parameter.numel() * parameter.itemsize
            if size <= _READ_AT_ONCE:  # larger ones would delay the sync; they are read at the end
                due.append(name)
                room -= size
        return due


def _trace(parameter: torch.Tensor) -> tuple[int, int]:
    """A value that changes when a parameter is written to, or is given other memory."""
    # torch has no public way to ask whether a tensor was written to.
    version = 0 if parameter.is_inference() else parameter._version  # noqa: SLF001
    return version, address(parameter)
