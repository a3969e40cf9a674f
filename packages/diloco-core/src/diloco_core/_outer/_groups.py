"""Several outer parameter groups: parts of a model whose outer steps have settings of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from .._errors import ConfigurationError
from .._terms._terms import OuterGroup
from ._learning_rate import lr_of_sync
from ._optimizer import OuterOptimizer, make, outer_factory
from ._trial import try_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .._arithmetic._layout import Piece
    from ._learning_rate import LearningRate
    from ._optimizer import OuterOptimizerFactory

_OF_SGD = {"lr": "outer_lr", "momentum": "outer_momentum", "nesterov": "nesterov"}


def outer_groups(
    groups: Sequence[Mapping[str, Any]] | None,
    optimizer: OuterOptimizerFactory | None,
    lr: float | LearningRate | None,
    momentum: float | None,
    nesterov: bool | None,
) -> list[OuterGroup]:
    """How the outer parameter groups are stepped: one for each of ``groups``, or a single one if that is None.

    Args:
        groups: Settings by name, besides ``"params"``; what a group leaves out is as the other arguments say.
        optimizer: As for :func:`outer_factory`, as are the following ones.
        lr: Learning rate.
        momentum: Momentum.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ConfigurationError: A setting is not allowed, or the optimizer cannot take the outer steps. The message names the group.
    """
    factory = outer_factory(optimizer, lr, momentum, nesterov)
    found = []
    for number, group in enumerate([{}] if groups is None else groups):
        given = {key: value for key, value in group.items() if key != "params"}
        rate = given.get("lr", lr)
        schedule = rate if callable(rate) else None
        try:
            if schedule is not None:
                lr_of_sync(schedule, 1)
            if optimizer is None:
                _check_known(given, _OF_SGD)
                settings = dict(zip(_OF_SGD, (lr, momentum, nesterov), strict=True)) | given
                own = outer_factory(None, *settings.values()) if given else factory
            else:
                own = _with_settings(optimizer, given) if given else factory
                try_out(own)
        except ConfigurationError as error:
            if groups is None:
                raise
            raise ConfigurationError(f"outer_groups[{number}]: {_of_the_group(error)}") from error
        found.append(OuterGroup(own, schedule))
    return found


def _of_the_group(error: ConfigurationError) -> str:
    """The same sentence with the names that settings have in a group."""
    return re.sub(r"\bouter_(lr|momentum)\b", r"\1", str(error))


def _with_settings(
    optimizer: OuterOptimizerFactory, given: Mapping[str, Any]
) -> OuterOptimizerFactory:
    """The caller's function for one group: as torch's optimizers take them, with settings of the group's own."""
    # A function of the sync is no setting of the optimizer, whose own rate is replaced before every step.
    fixed = {key: value for key, value in given.items() if not (key == "lr" and callable(value))}

    def factory(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        group: Any = [{"params": parameters, **fixed}]
        return optimizer(group)

    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    _check_known(given, make(factory, [probe]).defaults)
    return factory


def _check_known(given: Mapping[str, Any], known: Iterable[str]) -> None:
    # torch ignores settings that an optimizer does not know.
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"{key!r} is not a setting of the outer optimizer, which has {', '.join(map(repr, known))}"
            )


class OuterGroups:
    """The outer optimizers of a fragment's parameter groups, with the members of one :class:`.OuterOptimizer`. Not thread-safe.

    Each group has an optimizer of its own. Their tensors and scalars are published and saved under names that begin with the
    group's number, since two groups need not keep the same ones.

    Args:
        parts: The optimizer of every group.
    """

    def __init__(self, parts: Sequence[OuterOptimizer]) -> None:
        self._parts = list(parts)
        self._of: list[int] = []

    def arranged(self, groups: Sequence[int]) -> None:
        """Take note of the outer group of each flat vector of the fragment's layout."""
        self._of = list(groups)

    def part(self, piece: Piece) -> OuterOptimizer:
        """The optimizer that updates a piece."""
        return self._parts[self._of[piece.group]]

    def name_of(self, piece: Piece, name: str) -> str:
        """The name under which a tensor that belongs to a piece is published."""
        return f"{self._of[piece.group]}/{name}"

    def keeps(self, piece: Piece, name: str) -> bool:
        """Whether a tensor with this name can belong to a piece."""
        return name.startswith(self.name_of(piece, ""))

    @property
    def name(self) -> str:
        """The name of the optimizers' class."""
        return self._parts[0].name

    @property
    def settings(self) -> dict[str, str]:
        """The class and the hyperparameters of every group as text, in which all replicas must agree."""
        return {
            f"outer_groups[{number}].{key.removeprefix('outer_')}": value
            for number, part in enumerate(self._parts)
            for key, value in part.settings.items()
        }

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group; empty if the optimizers have none."""
        return tuple(rate for part in self._parts for rate in part.rates)

    def check_changeable(self, what: str) -> None:
        """Refuse optimizers without a learning rate, as :meth:`.OuterOptimizer.check_changeable` does."""
        for part in self._parts:
            part.check_changeable(what)

    def check_state_codec(self, name: str) -> None:
        """Refuse a codec for their state, as :meth:`.OuterOptimizer.check_state_codec` does."""
        for part in self._parts:
            part.check_state_codec(name)

    def use(self, rates: Sequence[float]) -> None:
        """Take the next steps with these learning rates, one for every group; as before if there are none."""
        if rates:
            for part, rate in zip(self._parts, rates, strict=True):
                part.use((rate,))

    def tensors_kept(self) -> int:
        """The most tensors of the size of the values that one of them keeps."""
        return max(part.tensors_kept() for part in self._parts)

    def not_finite(self, piece: Piece) -> int | None:
        """As :meth:`.OuterOptimizer.not_finite`."""
        return self.part(piece).not_finite(piece)

    def step(self, piece: Piece, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """As :meth:`.OuterOptimizer.step`."""
        self.part(piece).step(piece, values, gradient)

    def prepare(self, piece: Piece, values: torch.Tensor) -> None:
        """As :meth:`.OuterOptimizer.prepare`."""
        self.part(piece).prepare(piece, values)

    def keep(self, piece: Piece, name: str, values: torch.Tensor) -> None:
        """As :meth:`.OuterOptimizer.keep`; ``name`` is without the group's number."""
        self.part(piece).keep(piece, name, values)

    def tensors(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The tensors of a chunk, under the names with which they are published."""
        tensors = self.part(piece).tensors(piece)
        return {self.name_of(piece, name): values for name, values in tensors.items()}

    def scalars(self, piece: Piece) -> dict[str, float]:
        """The single numbers of a chunk, under the names with which they are published."""
        scalars = self.part(piece).scalars(piece)
        return {self.name_of(piece, name): value for name, value in scalars.items()}

    def install(
        self,
        piece: Piece,
        values: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float],
    ) -> None:
        """As :meth:`.OuterOptimizer.install`; the scalars may be those of all groups."""
        start = self.name_of(piece, "")
        self.part(piece).install(piece, values, _own(tensors, start), _own(scalars, start))

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Drop the state of some chunks."""
        for piece in pieces:
            self.part(piece).forget([piece])

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in the form that :meth:`.OuterOptimizer.state_dict` has."""
        states = [part.state_dict() for part in self._parts]
        return {
            "ranges": [entry for state in states for entry in state["ranges"]],
            "scalars": {
                f"{number}/{name}": value
                for number, state in enumerate(states)
                for name, value in state["scalars"].items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use this state from the next steps on. Chunks may have other sizes than when it was saved."""
        for number, part in enumerate(self._parts):
            ranges = [entry for entry in state["ranges"] if self._of[entry["range"][0]] == number]
            scalars = _own(state["scalars"], f"{number}/")
            part.load_state_dict({"ranges": ranges, "scalars": scalars})


def check_settings(
    outers: Sequence[OuterOptimizer | OuterGroups], settings: Mapping[str, str]
) -> None:
    """Refuse outer optimizers with other settings than the run's.

    Args:
        outers: One for each fragment.
        settings: The settings that all replicas have compared when they met.

    Raises:
        ConfigurationError: An optimizer has another setting. The error names the setting, both values and the fragment.
    """
    for index, outer in enumerate(outers):
        for name, value in outer.settings.items():
            if value != settings.get(name):
                raise ConfigurationError(
                    f"{name} is {value} for fragment {index}, but {settings.get(name)} in the run: all outer optimizers must "
                    "have the same settings from the start to the end of a run. Pass an outer_optimizer function that uses the "
                    "same settings at every call, and do not change them afterwards."
                )


def _own(values: Mapping[str, Any], start: str) -> dict[str, Any]:
    """Those whose names begin with ``start``, without it."""
    return {
        name.removeprefix(start): value for name, value in values.items() if name.startswith(start)
    }
