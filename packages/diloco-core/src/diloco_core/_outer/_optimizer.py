"""The outer optimizer: any element-wise torch optimizer.

It is applied chunk by chunk to the shards that a replica owns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from .._arithmetic._layout import Piece
from .._checks import kind_of, number
from .._errors import ConfigurationError
from .._generators import undisturbed
from .._squares import not_finite
from .._terms._terms import OuterGroup

LearningRate: TypeAlias = Callable[[int], float]
OuterOptimizerFactory: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OF_THE_SYNC = "a function of the sync"
"""The setting ``outer_lr`` of loops whose learning rate is a function.

Replicas compare this text, and not what the function returns.
"""


def checked_lr(name: str, value: object) -> float:
    """A learning rate as a ``float``.

    Raises:
        ConfigurationError: It is not a finite number above 0. The message begins with ``name``.
    """
    lr = number(name, value)
    if not lr > 0:
        raise ConfigurationError(f"{name} must be positive, not {lr}; usual values are 0.4 to 1.0")
    return lr


def lr_of_sync(schedule: LearningRate, sync: int) -> float:
    """Return what the caller's function returns for a sync, counted from 1.

    Raises:
        ConfigurationError: It raises an error, or returns something else than a positive number.
    """
    try:
        value = schedule(sync)
    except Exception as error:
        raise ConfigurationError(
            f"outer_lr is a function, and outer_lr({sync}) raised {type(error).__name__}: {error}. "
            "It is called with the number of each outer step, from 1, and must return the learning "
            "rate of that step."
        ) from error
    return checked_lr(f"what outer_lr({sync}) returns", value)


class _Part:
    """The torch optimizer of one outer parameter group."""

    def __init__(self, group: OuterGroup) -> None:
        probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        self.factory = group.factory
        self.optimizer = make(group.factory, [probe])
        # Some make a parameter's state only in their constructor, as Adagrad of torch 2.11.
        self._state_comes_from_constructor = bool(self.optimizer.state.pop(probe, None))
        self.group["params"] = []
        self.name = type(self.optimizer).__name__
        self._scheduled = group.schedule is not None
        if self._scheduled:
            self.check_changeable("outer_lr is a function")
        self._lr_at_first = self._lr_used = self.group.get("lr")

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def step(self, parameter: torch.nn.Parameter) -> None:
        state = self.optimizer.state
        if self._state_comes_from_constructor and not state.get(parameter):
            state[parameter] = make(self.factory, [parameter]).state[parameter]
        self.group["params"] = [parameter]
        self.optimizer.step()
        self.group["params"] = []

    def settings(self) -> dict[str, str]:
        values = {key: _as_text(value) for key, value in self.group.items() if key != "params"}
        # What use() has set is allowed. Anything else was set by the caller, and is refused.
        if "lr" in values and values["lr"] == _as_text(self._lr_used):
            values["lr"] = OF_THE_SYNC if self._scheduled else _as_text(self._lr_at_first)
        return {"optimizer": self.name, **dict(sorted(values.items()))}

    @property
    def lr(self) -> float:
        return float(self.group.get("lr", 1.0))

    def check_changeable(self, what: str) -> None:
        if "lr" not in self.group:
            raise ConfigurationError(
                f"{what}, but the outer optimizer {self.name} has no learning rate: its parameter "
                "group has no 'lr'"
            )

    def use(self, rate: float) -> None:
        if rate == self.lr:
            return
        lr = self.group["lr"]
        # Some optimizers keep it as a tensor, whose dtype may round it, as on every replica.
        self._lr_used = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
        self.group["lr"] = self._lr_used


class OuterOptimizer:
    """The outer optimizers, one for each outer group, stepped one chunk at a time.

    They are torch optimizers whose parameters are chunks of flat shards.

    Torch keeps an optimizer's state per parameter, so the results are the same if it is given one
    chunk at a time, while that chunk is still in the processor's cache. With several groups,
    tensors and scalars are published under names that begin with the group's number, since two
    groups need not keep the same ones. Not thread-safe.

    Args:
        groups: How each outer parameter group is stepped. There are none for means, which take no
            outer step.

    Attributes:
        groups: The number of the outer group of each flat vector of the fragment's layout.

    Raises:
        ConfigurationError: A factory does not make an optimizer of these parameters, its settings
            are impossible, or it has no learning rate that could change.
    """

    def __init__(self, groups: Sequence[OuterGroup]) -> None:
        self._parts = [_Part(group) for group in groups]
        self._several = len(self._parts) > 1
        self.groups: Sequence[int] = ()
        self._chunks: dict[Piece, torch.nn.Parameter] = {}
        self._loaded: dict[str, Any] = {}

    def _part(self, piece: Piece) -> _Part:
        """The optimizer that updates a piece."""
        return self._parts[self.groups[piece.group] if self._several else 0]

    def name_of(self, piece: Piece, name: str) -> str:
        """The name under which a tensor that belongs to a piece is published."""
        return f"{self.groups[piece.group]}/{name}" if self._several else name

    def keeps(self, piece: Piece, name: str) -> bool:
        """Say whether a tensor with this name can belong to a piece."""
        return name.startswith(self.name_of(piece, ""))

    @property
    def name(self) -> str:
        """The name of the optimizers' class."""
        return self._parts[0].name

    @property
    def settings(self) -> dict[str, str]:
        """Each group's class and hyperparameters as text, on which all replicas have to agree."""
        return {
            f"outer_groups[{number}].{key}" if self._several else f"outer_{key}": value
            for number, part in enumerate(self._parts)
            for key, value in part.settings().items()
        }

    def lr(self, piece: Piece) -> float | None:
        """The learning rate of the next step of a piece; None if there are no groups."""
        return self._part(piece).lr if self._parts else None

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group; empty if the optimizers have none."""
        return tuple(part.lr for part in self._parts if "lr" in part.group)

    def check_changeable(self, what: str) -> None:
        """Refuse an optimizer that has no learning rate; ``what`` says why it needs one.

        Raises:
            ConfigurationError: It has none.
        """
        for part in self._parts:
            part.check_changeable(what)

    def use(self, rates: Sequence[float]) -> None:
        """Take the next steps with these learning rates, one for every group.

        If there are none, the rates stay as they were.
        """
        for part, rate in zip(self._parts, rates, strict=bool(rates)):
            part.use(rate)

    def tensors_kept(self) -> int:
        """Count the tensors of the values' size that it keeps: 1 for SGD with momentum, 2 for Adam.

        Takes one step to see.
        """
        piece, kept = Piece(0, 0, 1), []
        # Some optimizers draw random numbers, which must not change those of the training.
        with undisturbed(), torch.device("cpu"):
            for part in self._parts:
                outer = OuterOptimizer([OuterGroup(part.factory)])
                outer.step(piece, torch.zeros(1), torch.zeros(1))
                kept.append(len(outer.tensors(piece)))
        return max(kept)

    def not_finite(self, piece: Piece) -> int | None:
        """The index of an element of a chunk whose state is NaN or infinite; None if there is none.

        Plain SGD is not checked, since an overflow of its momentum also shows in the values.
        """
        if not self._parts or isinstance(self._part(piece).optimizer, torch.optim.SGD):
            return None
        found = map(not_finite, self.tensors(piece).values())
        return next((index for index in found if index is not None), None)

    def step(self, piece: Piece, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update ``values`` (a flat view that stays the same from step to step) in place."""
        parameter = self._parameter(piece, values)
        parameter.grad = gradient
        # It makes its state on the CPU, whatever torch's default device is. An empty tensor shows
        # that device, and costs a tenth of torch.get_default_device(): this runs once per chunk.
        with nullcontext() if torch.empty(0).is_cpu else torch.device("cpu"):
            self._part(piece).step(parameter)
        parameter.grad = None

    def prepare(self, piece: Piece, values: torch.Tensor) -> None:
        """Give a chunk its part of a loaded state now, and not only in its first step.

        Without such a state, do nothing.
        """
        if self._loaded.get("ranges"):
            self._parameter(piece, values)

    def _parameter(self, piece: Piece, values: torch.Tensor) -> torch.nn.Parameter:
        parameter = self._chunks.get(piece)
        if parameter is None:
            parameter = self._chunks[piece] = torch.nn.Parameter(values)
            if self._loaded.get("ranges"):
                self._part(piece).optimizer.state[parameter] = self._loaded_state(piece, values)
        return parameter

    def state(self, piece: Piece) -> Mapping[str, Any]:
        """The state that the optimizer keeps for a chunk. Empty before its first step."""
        if piece not in self._chunks:
            return {}
        state: dict[str, Any] = self._part(piece).optimizer.state[self._chunks[piece]]
        return state

    def tensors(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The state of a chunk with one number per element: flat tensors of its size.

        Empty before its first step.
        """
        state = self.state(piece).items()
        return {self.name_of(piece, name): each for name, each in state if _is_elementwise(each)}

    def scalars(self, piece: Piece) -> dict[str, float]:
        """The state of a chunk that consists of single numbers, such as a step count.

        Empty before its first step.
        """
        return {
            self.name_of(piece, name): float(value)
            for name, value in self.state(piece).items()
            if value is not None and not _is_elementwise(value)
        }

    def install(
        self,
        piece: Piece,
        values: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float],
    ) -> None:
        """Replace the state of a chunk.

        ``values`` is the flat view that steps will update; ``tensors`` are kept, not copied.

        The scalars may be those of all groups.
        """
        self.forget([piece])
        parameter = self._chunks[piece] = torch.nn.Parameter(values)
        start = self.name_of(piece, "")
        state = {**_as_tensors(_own(scalars, start)), **_own(tensors, start)}
        if state:
            self._part(piece).optimizer.state[parameter] = state

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Drop the state of some chunks."""
        for piece in pieces:
            parameter = self._chunks.pop(piece, None)
            if parameter is not None:
                self._part(piece).optimizer.state.pop(parameter, None)

    def keep(self, piece: Piece, name: str, values: torch.Tensor) -> None:
        """Keep a tensor with the state of a chunk that has taken a step.

        It is saved and loaded with that state.

        ``name`` is without the group's number.
        """
        self._part(piece).optimizer.state[self._chunks[piece]][name] = values

    def check_state_codec(self, name: str) -> None:
        """Refuse a codec for the state of an optimizer that could not bear it.

        Raises:
            ConfigurationError: The optimizer keeps other tensors than a momentum.
        """
        for part in self._parts:
            if not isinstance(part.optimizer, torch.optim.SGD):
                raise ConfigurationError(
                    f"state_codec={name!r} cannot be used with the outer optimizer {part.name}: "
                    "its state is published encoded, and small numbers of a block, such as Adam's "
                    "second moments, may become zero, which makes its steps arbitrarily large. Use "
                    "torch.optim.SGD as the outer optimizer, or leave state_codec out."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: ranges (group, start, stop) with tensors, and the scalars."""
        ranges, scalars = [], {}
        for piece in self._chunks:
            tensors = _own(self.tensors(piece), self.name_of(piece, ""))
            ranges.append({"range": [piece.group, piece.start, piece.stop], "tensors": tensors})
            scalars.update(self.scalars(piece))
        return {
            "ranges": ranges or self._loaded.get("ranges", []),
            "scalars": scalars or self._loaded.get("scalars", {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use this state from the next steps on.

        Chunks may have other sizes than when it was saved.
        """
        # A copy, since the caller may change it until it is used in the next steps.
        self._loaded = copy.deepcopy(dict(state))
        self._chunks.clear()
        for part in self._parts:
            part.optimizer.state.clear()

    def _loaded_state(self, piece: Piece, values: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = _as_tensors(_own(self._loaded["scalars"], self.name_of(piece, "")))
        restored = 0  # number of elements of the chunk whose state was loaded
        for entry in self._loaded["ranges"]:
            group, range_start, range_stop = entry["range"]
            start, stop = max(range_start, piece.start), min(range_stop, piece.stop)
            if group == piece.group and start < stop:
                restored += stop - start
                here = slice(start - piece.start, stop - piece.start)
                for name, loaded in entry["tensors"].items():
                    target = state.setdefault(name, torch.empty_like(values))
                    target[here] = loaded[start - range_start : stop - range_start]
        if restored != piece.numel:
            raise ConfigurationError(
                "the loaded state holds the outer optimizer's state for the shards of another "
                "replica: load the state that was saved by the same rank of a run with the same "
                "world size"
            )
        return state


def check_settings(outers: Sequence[OuterOptimizer], settings: Mapping[str, str]) -> None:
    """Refuse outer optimizers with other settings than the run's.

    Args:
        outers: One for each fragment.
        settings: The settings that all replicas have compared when they met.

    Raises:
        ConfigurationError: An optimizer has another setting. The error names the setting, both
            values and the fragment.
    """
    for index, outer in enumerate(outers):
        for name, value in outer.settings.items():
            if value != settings.get(name):
                raise ConfigurationError(
                    f"{name} is {value} for fragment {index}, but {settings.get(name)} in the run: "
                    "all outer optimizers must have the same settings from the start to the end of "
                    "a run. Pass an outer_optimizer function that uses the same settings at every "
                    "call, and do not change them afterwards."
                )


def _own(values: Mapping[str, Any], start: str) -> dict[str, Any]:
    """Those whose names begin with ``start``, without it."""
    return {
        name.removeprefix(start): value for name, value in values.items() if name.startswith(start)
    }


def _as_text(value: object) -> str:
    if isinstance(value, torch.Tensor):  # str() would show only four digits
        value = value.tolist()
    # For a function, str() would show its address in memory.
    return getattr(value, "__qualname__", None) or str(value)


def _is_elementwise(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def make(
    factory: OuterOptimizerFactory, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of these parameters, and check it before it is used.

    Raises:
        ConfigurationError: It cannot be made, is not an optimizer of these parameters, or its
            settings are impossible.
    """
    try:
        optimizer = factory(parameters)
    except Exception as error:
        raise ConfigurationError(
            "outer_optimizer could not make an optimizer for a list of flat parameters, which it "
            f"must be able to do: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"outer_optimizer must return a torch.optim.Optimizer, not {kind_of(optimizer)}"
        )
    name = type(optimizer).__name__
    if len(optimizer.param_groups) != 1:
        raise ConfigurationError(
            f"the outer optimizer {name} must have one parameter group, not "
            f"{len(optimizer.param_groups)}. To step parts of the model differently, pass "
            "outer_groups"
        )
    group = optimizer.param_groups[0]
    if [id(parameter) for parameter in group["params"]] != [
        id(parameter) for parameter in parameters
    ]:
        raise ConfigurationError(
            f"the outer optimizer {name} does not hold the parameters that were passed to "
            "outer_optimizer: make a new optimizer at every call, from the list that is passed in"
        )
    checked_lr("the outer learning rate", group.get("lr", 1.0))
    if group.get("maximize"):
        raise ConfigurationError(
            f"the outer optimizer {name} has maximize=True, which would undo the progress of the "
            "replicas: leave it out"
        )
    return optimizer


def _as_tensors(scalars: Mapping[str, float]) -> dict[str, Any]:
    """Return numbers in the form in which torch's own optimizers keep them.

    They have double precision only if it is the default dtype.
    """
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    return {name: torch.tensor(value, dtype=dtype, device="cpu") for name, value in scalars.items()}
