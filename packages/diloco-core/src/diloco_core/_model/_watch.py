"""Checking that the synced tensors are still those of the model.

It also sees that all trainable tensors of the model are still synced. Otherwise a parameter that is
replaced, converted or unfrozen, or an optimizer that trains something else, would go unnoticed, and
the replicas would silently drift apart. The check takes time in proportion to the number of
tensors, not to their size: no value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._errors import ConfigurationError, ModelChangedError
from ._memory import address, first_overlap
from ._values import describe, named_buffers, plain_name

_WHEN = "when the outer loop was made"


@dataclass(frozen=True, slots=True)
class _Original:
    """A tensor, and how it was when the outer loop was made."""

    tensor: torch.Tensor
    description: str
    frozen: bool


class ModelWatch:
    """Remembers the tensors of a model, and compares the model with them later. Not thread-safe.

    Args:
        model: The model.
        optimizers: The inner optimizers.
        buffers_are_synced: Whether the buffers are synced as well that are saved with it.

    Raises:
        ConfigurationError: Two tensors share memory without being the same tensor, an optimizer
            holds a tensor that is not a parameter of the model, or no optimizer holds a trainable
            parameter.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        buffers_are_synced: bool,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._parameters = {
            name: _Original(parameter, describe(parameter), not parameter.requires_grad)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        persistent = named_buffers(model, persistent=True) if buffers_are_synced else {}
        # All names of a buffer stand for one tensor, which is synced under the first of them,
        # without the names of wrappers.
        synced_as = {id(each): plain_name(model, n) for n, each in reversed(persistent.items())}
        self._buffers = {
            n: _Original(each, describe(each), False) for n, each in persistent.items()
        }
        self._synced_as = {name: synced_as[id(buffer)] for name, buffer in persistent.items()}
        self._buffers_are_synced = buffers_are_synced
        self._addresses: list[tuple[int, tuple[int, ...]]] = []
        self._check_optimizers(_refuse_argument)
        self._check_memory(_refuse_argument)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters, under all of their names."""
        return {name: original.tensor for name, original in self._parameters.items()}

    @property
    def frozen(self) -> dict[str, torch.Tensor]:
        """The parameters that are not synced because they were frozen at the start, by name."""
        return {
            name: original.tensor for name, original in self._parameters.items() if original.frozen
        }

    def check(self) -> dict[str, torch.Tensor]:
        """Compare the model with what it was.

        A parameter that was trainable may be frozen, and unfrozen again. Values, devices and
        gradients may change.

        Returns:
            The synced buffers by name. Modules may have replaced them with new tensors, as is
            common in ``forward``.

        Raises:
            ModelChangedError: The model has changed; the error names the first tensor that cannot
                be synced as it is.
        """
        self._check_parameters()
        buffers = self._check_buffers()
        self._check_optimizers(_refuse_change)
        self._check_memory(_refuse_change)
        return buffers

    def _check_parameters(self) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        self._check_names("parameter", self._parameters, now)
        for name, parameter in now.items():
            original = self._parameters[name]
            if parameter is not original.tensor:
                _refuse_change(
                    name,
                    f"parameter {name!r} is another tensor ({describe(parameter)}) than {_WHEN} "
                    f"({original.description}), so the tensor that is trained is not the one that "
                    "is synced. Copy values into the existing tensor (load_state_dict without "
                    "assign=True, model.to without replacing parameters), or make the outer loop "
                    "afterwards.",
                )
            if original.description != describe(parameter):
                _refuse_change(
                    name,
                    f"parameter {name!r} was {original.description} {_WHEN} and is now "
                    f"{describe(parameter)}. Convert the model before the outer loop is made.",
                )
            if original.frozen and parameter.requires_grad:
                _refuse_change(
                    name,
                    f"parameter {name!r} was frozen {_WHEN} and is trainable now. It would never "
                    "be synced, because the set of synced parameters is fixed for the run. Make "
                    "the outer loop while the parameter is trainable; it may be frozen afterwards.",
                )

    def _check_buffers(self) -> dict[str, torch.Tensor]:
        if not self._buffers_are_synced:
            return {}
        now = named_buffers(self._model, persistent=True)
        self._check_names("buffer", self._buffers, now)
        buffers: dict[str, torch.Tensor] = {}
        for name, buffer in now.items():
            original = self._buffers[name]
            if original.description != describe(buffer):
                _refuse_change(
                    name,
                    f"buffer {name!r} was {original.description} {_WHEN} and is now "
                    f"{describe(buffer)}, but a synced buffer may only change its values. Keep "
                    "its shape and dtype, register it with persistent=False, or pass "
                    "buffers='none'.",
                )
            if buffer.is_inference():
                _refuse_change(
                    name,
                    f"buffer {name!r} was made inside torch.inference_mode() and cannot be "
                    "written to, so it cannot be synced. Evaluate the model inside "
                    "torch.no_grad() instead, or without assigning new buffers.",
                )
            synced_name = self._synced_as[name]
            if buffers.setdefault(synced_name, buffer) is not buffer:
                _refuse_change(
                    name,
                    f"buffers {synced_name!r} and {name!r} were one tensor {_WHEN} and are two "
                    "now, and only one would be synced. Assign a new tensor under all of its "
                    "names, or copy values into the existing tensor.",
                )
        return buffers

    def _check_names(
        self, kind: str, original: Mapping[str, _Original], now: Mapping[str, torch.Tensor]
    ) -> None:
        if original.keys() == now.keys():
            return
        for name in original:
            if name not in now:
                _refuse_change(
                    name,
                    f"{kind} {name!r} ({original[name].description}) is no longer in the model, "
                    "or has another name now. Change the model before the outer loop is made.",
                )
        for name, tensor in now.items():
            if name not in original:
                _refuse_change(
                    name,
                    f"{kind} {name!r} ({describe(tensor)}) was not in the model {_WHEN}: it would "
                    "never be synced. Change the model before the outer loop is made.",
                )

    def _check_optimizers(self, refuse: Callable[[str, str], None]) -> None:
        model_parameters = {id(original.tensor) for original in self._parameters.values()}
        held: set[int] = set()
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for position, tensor in enumerate(group["params"]):
                    if id(tensor) not in model_parameters:
                        optimizer_name = f"inner optimizer {number} ({type(optimizer).__name__})"
                        refuse(
                            "",
                            f"{optimizer_name} holds a tensor that is not a parameter of the "
                            f"model: number {position} of its group {index}, {describe(tensor)}. "
                            "It would be trained and never synced. Make the optimizer from the "
                            "parameters of this model, after every operation that replaces them.",
                        )
                    held.add(id(tensor))
        for name, original in self._parameters.items():
            if original.tensor.requires_grad and id(original.tensor) not in held:
                refuse(
                    name,
                    f"parameter {name!r} ({original.description}) is trainable, but no inner "
                    "optimizer holds it. Pass all optimizers of the training loop "
                    "(inner_optimizer=[a, b]), add it to one of them, or freeze it.",
                )

    def _check_memory(self, refuse: Callable[[str, str], None]) -> None:
        synced = named_buffers(self._model, persistent=True) if self._buffers_are_synced else {}
        named = [*self.parameters.items(), *synced.items()]
        names = {id(each): name for name, each in reversed(named)}
        tensors = [*{id(each): each for _, each in named}.values()]
        addresses = [
            (address(tensor), tensor.stride()) if address(tensor) else (0, ()) for tensor in tensors
        ]
        if addresses == self._addresses:
            return
        overlap = first_overlap(tensors)
        if overlap is not None:
            first, second = (names[id(tensor)] for tensor in overlap)
            if first == second:
                refuse(
                    first,
                    f"elements of {first!r} ({describe(overlap[0])}) share memory with each other "
                    "(is it an expanded tensor?), so they cannot have values of their own. Give "
                    "every element its own memory: clone() the tensor.",
                )
            refuse(
                second,
                f"{first!r} and {second!r} share memory without being the same tensor, so their "
                "values would be synced twice. Tie them by assignment (module.weight = "
                "other.weight), or give each its own memory: clone() one of them.",
            )
        self._addresses = addresses


# It has the signature of _refuse_change.
def _refuse_argument(name: str, message: str) -> None:  # noqa: ARG001
    raise ConfigurationError(message)


def _refuse_change(name: str, message: str) -> None:
    raise ModelChangedError(message, name)
