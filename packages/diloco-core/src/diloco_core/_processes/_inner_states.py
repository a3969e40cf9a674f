"""The inner states of all processes of a replica, which the leader saves in one file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._errors import ConfigurationError
from .._inner._state import InnerState, Stateful
from .._loop._inner_loop import TrainingProcess
from ._ending import put_off
from ._inside import Inside
from ._moves import What

_PART = "part"


class PartialState(InnerState):
    """The inner state of one process, which holds parts of tensors; see :class:`.InnerState`."""

    def _state_of(self, holder: Stateful) -> Any:
        state = holder.state_dict()
        return _parts(state) if isinstance(holder, torch.optim.Optimizer) else state

    def _load(self, holder: Stateful, state: Any) -> None:
        holder.load_state_dict(state)
        if isinstance(holder, torch.optim.Optimizer):
            for parameter, values in holder.state.items():
                values.update({name: _whole(value, parameter) for name, value in values.items()})


def _parts(value: Any) -> Any:
    """A state in which what this process holds of a tensor stands for the tensor."""
    if isinstance(value, dict):
        return {key: _parts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_parts, value))
    return {_PART: value.to_local()} if isinstance(value, DTensor) else value


def _whole(value: Any, parameter: torch.Tensor) -> Any:
    """The tensor of which :func:`_parts` has made this; it lies as its parameter does."""
    if not (isinstance(value, dict) and value.keys() == {_PART}):
        return value
    like = parameter.detach()
    if not isinstance(like, DTensor) or value[_PART].shape != like.to_local().shape:
        raise ConfigurationError("it was saved with other parts of the model on this process")
    return DTensor.from_local(
        value[_PART],
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


class InnerStates:
    """Has every process try out, give or take its inner state, as the leader's loop asks.

    To that loop it is one more object whose state is saved (:class:`.Stateful`): a file of bytes
    from each process. Not thread-safe.

    Args:
        inside: The processes.
        own: The state of this process.
        process: Handles SIGTERM, which waits until all processes are done.

    Attributes:
        knows_data: Whether this process has something that may know which batches were learned.
        before_save: Called on the leader before all are asked for their files. What the loop saves
            after these, such as open inner steps, it reads from the twin.
    """

    def __init__(self, inside: Inside, own: InnerState, process: TrainingProcess) -> None:
        self._inside, self._own, self._process = inside, own, process
        self._identity = f"process {inside.process} of {inside.processes}"
        self.knows_data = True
        self.before_save: Callable[[], object] = bool

    def try_out(self) -> None:
        """Check on every process that all can be saved; called on the leader."""
        self._lead("try")

    def state_dict(self) -> dict[str, Any]:
        """Return the files of all processes, as bytes in a tensor each; called on the leader."""
        self.before_save()
        return {"files": self._lead("save")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each process its file; called on the leader."""
        self._lead("load", state["files"])

    def _lead(self, what: What, files: Sequence[torch.Tensor] | None = None) -> Any:
        with put_off(self._process):
            self._inside.share(what)
            return self.act(what, files)

    def act(self, what: What, files: Sequence[torch.Tensor] | None = None) -> Any:
        """Do what the leader has asked for; it alone has the files that are loaded."""
        inside, own = self._inside, self._own
        match what:
            case "try":
                inside.together(own.try_out)
            case "save":
                file = inside.together(lambda: bytearray().join(own.parts(0, self._identity)))
                return inside.gather_bytes(torch.frombuffer(file, dtype=torch.uint8))
            case "load":
                data = inside.scatter_bytes(files).numpy().tobytes()
                name = f"the inner state of process {inside.process}"
                inside.together(lambda: own.restore(data, self._identity, name))
        return None


def layout_of(inside: Inside, model: torch.nn.Module) -> str:
    """Return how a model lies on the processes, as text: of another layout, no part would fit."""
    parts = [
        tuple(value.to_local().shape if isinstance(value, DTensor) else value.shape)
        for value in (parameter.detach() for parameter in model.parameters())
    ]
    digest = hashlib.sha256(repr(inside.collect(parts)).encode()).hexdigest()
    return f"{inside.processes} processes ({digest[:8]})"
