"""The buffers of a model that are not synced.

With ``buffers="none"`` each rank has its own, and saves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from .._checks import kind_of
from .._errors import ConfigurationError
from ._memory import first_overlap
from ._values import as_bytes, buffer_slots, is_plain, plain_name

_Slot: TypeAlias = tuple[torch.nn.Module, str]  # a module, and the name of one of its buffers


class OwnBuffers:
    """These buffers, as an object that is saved and restored; see :class:`.Stateful`.

    Not thread-safe.

    Args:
        model: The model. Its modules may assign new tensors to their buffers at any time, also of
            other shapes and dtypes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __bool__(self) -> bool:
        """Say whether the model has any persistent buffers."""
        return bool(self._slots())

    def state_dict(self) -> dict[str, Any]:
        """Return every persistent buffer: the number of its tensor by its name, and the tensors.

        The names are those in the plain model. Names that share a tensor have the same number, and
        a buffer that is None has none.

        Raises:
            ConfigurationError: A buffer is of a kind that cannot be saved.
        """
        numbers: dict[int, int] = {}
        names: dict[str, int | None] = {}
        tensors: list[dict[str, Any]] = []
        for name, (module, attribute) in self._slots().items():
            buffer = module._buffers[attribute]  # noqa: SLF001
            if buffer is not None and id(buffer) not in numbers:
                numbers[id(buffer)] = len(tensors)
                tensors.append(_packed(name, buffer))
            names[name] = None if buffer is None else numbers[id(buffer)]
        return {"names": names, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the buffers to the saved values.

        A new tensor is assigned where the saved values do not fit into the present one.

        Raises:
            ValueError: Other buffers were saved than the model has now.
        """
        slots = self._slots()
        modules = {
            plain_name(self._model, name): module
            for name, module in self._model.named_modules(remove_duplicate=False)
        }
        for name in state["names"].keys() - slots.keys():
            # A module may register a buffer in its first forward pass.
            owner, _, attribute = name.rpartition(".")
            if owner not in modules or hasattr(modules[owner], attribute):
                raise ValueError(f"buffer {name!r} was saved, but the model has no such buffer")
            slots[name] = (modules[owner], attribute)
        for name in slots.keys() - state["names"].keys():
            raise ValueError(f"the model has a buffer {name!r}, which was not saved")
        names: dict[int | None, list[str]] = {}
        for name in slots:
            names.setdefault(state["names"][name], []).append(name)
        held = {
            name: module._buffers.get(attribute)  # noqa: SLF001
            for name, (module, attribute) in slots.items()
        }
        for number, sharing in names.items():
            values = None if number is None else _unpacked(state["tensors"][number])
            present = held[sharing[0]]
            users = [name for name, buffer in held.items() if buffer is present]
            if present is None or values is None or users != sharing or not _takes(present, values):
                self._assign([slots[name] for name in sharing], values)
            else:
                with torch.no_grad():
                    present.copy_(values)

    def _assign(self, slots: Sequence[_Slot], values: torch.Tensor | None) -> None:
        """Make a tensor the buffer in these places, on the device of the first that is there."""
        module, attribute = slots[0]
        if values is not None:
            present = module._buffers.get(attribute)  # noqa: SLF001
            near = chain(module.parameters(), module.buffers(), self._model.parameters())
            values = values.to((next(near) if present is None else present).device, copy=True)
        for module, attribute in slots:
            module.register_buffer(attribute, values)

    def _slots(self) -> dict[str, _Slot]:
        slots = buffer_slots(self._model, persistent=True)
        return {plain_name(self._model, name): slot for name, slot in slots.items()}


def _packed(name: str, buffer: torch.Tensor) -> dict[str, Any]:
    if not is_plain(buffer):
        kind = f"{kind_of(buffer.detach())}, {buffer.dtype}, {buffer.layout}, on {buffer.device}"
        raise _refusal(name, f"it is not a plain, dense tensor ({kind})")
    try:
        values = as_bytes(buffer)
    except RuntimeError as error:
        raise _refusal(name, f"{type(error).__name__}: {error}") from error
    dtype = str(buffer.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(buffer.shape), "values": values}


def _unpacked(saved: Mapping[str, Any]) -> torch.Tensor:
    values: torch.Tensor = saved["values"]
    return values.view(getattr(torch, saved["dtype"])).reshape(saved["shape"])


def _refusal(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"buffer {name!r} belongs to this rank alone (buffers='none'), and cannot be saved for its "
        f"next incarnation: {why}. If it is the same in every new model, register it with "
        "persistent=False. Or keep its values in a plain, dense tensor. With save_inner_every=0, "
        "nothing is saved."
    )


def _takes(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    """Say whether values can be written into a tensor.

    It must have their shape and dtype, and each of its elements must have its own memory.
    """
    fits = (buffer.dtype, buffer.shape) == (values.dtype, values.shape)
    return fits and not buffer.is_inference() and first_overlap([buffer]) is None
