"""Noticing an inner optimizer that mixes weights of its own into the model.

Schedule-free optimizers and Lookahead do so. The weights have the model's own dtype.

What such an optimizer has written cannot be told from a step, and what it keeps may be an average
that it never uses. So a tiny twin of it takes a few steps without gradients: once as it is, and
once with other values in what it keeps. If its parameters move with these, and by as much
everywhere, it pulls the model towards them, and so away from the result of a sync. What never
changes is let alone, such as initial weights towards which some train: all replicas have the same.

An optimizer that makes the parameters anew at every step, without reading them, is found by
shifting these alone: a step later nothing is left of the shift.

What one attribute holds is tried out like what one name in the state holds. Not noticed is what is
kept flat for all parameters at once, what is written back less often than the twin steps, and what
only stands around the optimizer.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._errors import ModelChangedError
from .._model._values import part_here

_MOST_PARAMETERS = 4
_MOST_VALUES = 3  # in every dimension of a tensor
_STEPS = 128  # Lookahead returns to its slow weights after 5 to 100
_EXACT = 1e-6


class OwnWeights:
    """Tries optimizers out that torch does not bring, once for every kind of state that they have.

    Not thread-safe.

    Args:
        optimizers: The inner optimizers.
        names: The name of each parameter, by its ``id()``.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
    ) -> None:
        self._optimizers = [o for o in optimizers if not type(o).__module__.startswith("torch.")]
        self._names = names
        self._tried: set[tuple[int, _Place | None]] = set()

    def check(self) -> None:
        """Refuse an optimizer that would undo the sync that is about to begin.

        Raises:
            ModelChangedError: It keeps weights of its own, and moves the model towards them.
        """
        for number, optimizer in enumerate(self._optimizers):
            self._check_reads(number, optimizer)
            for place, parameters in _places(optimizer):
                if (number, place) in self._tried:
                    continue
                self._tried.add((number, place))
                if _pulls(optimizer, parameters[:_MOST_PARAMETERS], place):
                    parameter = self._names.get(id(parameters[0]), "?")
                    where = (
                        f"{place.name!r} in its state of parameter {parameter!r}"
                        if place.in_state
                        else f"its attribute {place.name!r}"
                    )
                    raise ModelChangedError(
                        f"the inner optimizer {type(optimizer).__name__} keeps weights of its own "
                        f"({where}) and moves the model towards them: every sync would be undone, "
                        "and the replicas would end with different models. Use an optimizer that "
                        "changes only the model's own weights. Slow weights are what the outer "
                        "loop keeps already; average weights in a copy of the model "
                        "(torch.optim.swa_utils.AveragedModel).",
                        parameter,
                    )

    def _check_reads(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        # Wider weights, such as fp32 ones of a bf16 model, are left to what is seen after the sync.
        weights = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if any(
                _is_like(kept, parameter) for kept in optimizer.state.get(parameter, {}).values()
            )
        ]
        if not weights or (number, None) in self._tried:
            return
        self._tried.add((number, None))
        if _overwrites(optimizer, weights[:_MOST_PARAMETERS]):
            name = self._names.get(id(weights[0]), "?")
            raise ModelChangedError(
                f"the inner optimizer {type(optimizer).__name__} makes the model's weights anew at "
                f"every step, from weights of its own, without reading them (parameter {name!r}): "
                "every sync would be undone, and the replicas would end with different models. Use "
                "an optimizer that changes the model's own weights.",
                name,
            )


class _Place(NamedTuple):
    """Name a place of an optimizer: a name in its state, or an attribute."""

    name: str
    in_state: bool

    def tensors(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what an optimizer keeps there for some of its parameters."""
        if self.in_state:
            return [optimizer.state[parameter][self.name] for parameter in parameters]
        return list(_tensors(vars(optimizer)[self.name]))


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Place, list[torch.Tensor]]]:
    """Return where an optimizer keeps what may be weights, and of which parameters."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    with_state = [p for p in parameters if optimizer.state.get(p)]
    for name in list(optimizer.state[with_state[0]]) if with_state else ():
        kept = [p for p in with_state if _is_like(optimizer.state[p].get(name), p)]
        if kept:
            yield _Place(name, True), kept
    first = parameters[0] if parameters else None
    for name, value in vars(optimizer).items():
        if first is None or name in {"state", "param_groups"}:
            continue
        if any(_is_like(tensor, first) for tensor in _tensors(value)):
            yield _Place(name, False), parameters


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in lists and tables, without the parameters."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        yield value
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, (list, tuple, deque)) else ():
        yield from _tensors(item)


def _is_like(kept: object, parameter: torch.Tensor) -> bool:
    return (
        isinstance(kept, torch.Tensor)
        and type(part_here(kept)) in {torch.Tensor, torch.nn.Parameter}
        and kept.dtype is parameter.dtype
        and kept.shape == parameter.shape
    )


def _overwrites(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Say whether a step leaves nothing of the values that parameters had before it."""

    def stepped(shift: float) -> torch.Tensor:
        small = _Twins(optimizer, parameters)
        for parameter in small.parameters:
            parameter.data.add_(shift)
            parameter.grad = torch.zeros_like(parameter)
        small.optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in small.parameters])

    with torch.enable_grad():
        try:
            # To both sides: weights that are clamped may be at one of the limits.
            plain, up, down = stepped(0.0), stepped(1e-3), stepped(-1e-3)
        except Exception:  # noqa: BLE001 - it cannot be tried out: nothing is known
            return False
    return bool(plain.numel()) and torch.equal(plain, up) and torch.equal(plain, down)


def _pulls(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], place: _Place
) -> bool:
    """Say whether an optimizer changes what it keeps in a place and pulls parameters to it."""
    with torch.enable_grad():
        try:
            plain, _ = _moved(optimizer, parameters, place, 0.0, 0.0)
            towards = _moved(optimizer, parameters, place, 0.0, 1.0)[0] - plain
            both = _moved(optimizer, parameters, place, 1.0, 1.0)[0] - plain
            if not _is_as_much_everywhere(towards, both):
                return False
            # Something that never changes is the same on all replicas.
            _, changes = _moved(optimizer, parameters, place, 0.0, 0.0, gradient=1.0)
        except Exception:  # noqa: BLE001 - it cannot be tried out: nothing is known
            return False
    return changes


def _is_as_much_everywhere(towards: torch.Tensor, both: torch.Tensor) -> bool:
    if not towards.numel() or not 1e-12 < towards.min().item() <= 1 + _EXACT:
        return False
    # A momentum moves parameters too, but not with them: only a copy of the weights may be shifted
    # together with them.
    apart = (towards - towards.mean()).abs().max() + (both - 1).abs().max()
    return bool(apart < _EXACT)


def _moved(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    place: _Place,
    shift: float,
    kept_shift: float,
    gradient: float = 0.0,
) -> tuple[torch.Tensor, bool]:
    """Return where a twin's parameters are after some steps that begin elsewhere.

    The parameters are shifted before these, and so is what the twin keeps. Return also whether the
    steps change what it keeps.
    """
    small = _Twins(optimizer, parameters)
    twin = small.optimizer
    with torch.no_grad():
        for parameter in small.parameters:
            parameter.add_(shift)
        for kept in place.tensors(twin, small.parameters):
            kept.add_(kept_shift)
    before = [kept.clone() for kept in place.tensors(twin, small.parameters)]
    for _ in range(_STEPS):
        for parameter in small.parameters:
            parameter.grad = torch.full_like(parameter, gradient)
        twin.step()
    after = place.tensors(twin, small.parameters)
    values = torch.cat([parameter.detach().flatten() for parameter in small.parameters])
    return values, not all(map(torch.equal, before, after))


class _Twins:
    """Copies of an optimizer, and of those that it wraps, for a few values of a few parameters.

    They are in float64 on the CPU, and share nothing with the original that a step could change.
    Anything but numbers, text, tensors and optimizers is refused. Of a list with as many entries as
    the original has parameters, only the first are copied.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._of_all = sum(len(group["params"]) for group in optimizer.param_groups)
        self._made: dict[int, Any] = {id(p): torch.nn.Parameter(_few(p)) for p in parameters}
        self.parameters = list(self._made.values())
        self.optimizer = self._of(optimizer)

    def _of(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        made = self._copy(value)
        self._made[id(value)] = made
        return made

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _few(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if isinstance(value, (list, tuple, deque)):
            most = len(self.parameters) if len(value) == self._of_all else len(value)
            some = [each for each in value if not self._is_left_out(each)][:most]
            parts = [self._of(each) for each in some]
            return parts if isinstance(value, list) else type(value)(parts)
        if isinstance(value, dict):
            pairs = {
                self._of(key): self._of(each)
                for key, each in value.items()
                if not self._is_left_out(key)
            }
            return defaultdict(dict, pairs) if isinstance(value, defaultdict) else pairs
        raise TypeError(f"{type(value).__name__} cannot be copied")

    def _is_left_out(self, value: object) -> bool:
        return isinstance(value, torch.nn.Parameter) and id(value) not in self._made

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        twin = type(optimizer).__new__(type(optimizer))
        self._made[id(optimizer)] = twin
        for name, value in vars(optimizer).items():
            if isinstance(value, OrderedDict) and name.startswith("_optimizer_"):
                vars(twin)[name] = OrderedDict()  # hooks
            elif name != "step":  # a schedule's, around that of the original
                vars(twin)[name] = self._of(value)
        for group in twin.param_groups:
            group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        return twin


def _few(tensor: torch.Tensor) -> torch.Tensor:
    few = part_here(tensor).detach()[tuple(slice(0, _MOST_VALUES) for _ in tensor.shape)]
    return few.to("cpu", torch.float64 if few.is_floating_point() else few.dtype, copy=True)
