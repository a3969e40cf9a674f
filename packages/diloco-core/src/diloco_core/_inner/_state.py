"""The state of one replica alone: inner optimizers, random generators, and what the user adds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .._checks import kind_of
from .._errors import ConfigurationError, CorruptedObjectError
from .._generators import random_state, set_random_state
from .._store._api import Buffer
from ._file import check_size, file_parts, pack, unpack, verified

# Fields of a saved file that are not states of objects.
_OTHER_FIELDS = {"random", "inner_steps", "rollback", "kinds", "parameters", "layout", "given"}


class Stateful(Protocol):
    """Anything with a position to save: a data loader, a learning rate schedule, a gradient scaler.

    It is saved inside the inner optimizer's ``step()`` where a sync follows, and again where the
    block is left. If a replica is killed, what the loop changed after that ``step()`` is not in the
    save: a ``schedule.step()`` or ``scaler.update()`` there is lost. At the beginning of each step,
    ``while schedule.last_epoch < outer.inner_steps: schedule.step()`` takes the schedule to where
    it belongs.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, made of numbers, text, lists, dicts and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Continue from a saved state."""


@runtime_checkable
class TriedOut(Stateful, Protocol):
    """Something that finds out by itself whether it can be saved, with less work than saving it.

    Attributes:
        knows_data: Whether a part of it may know which batches were learned.
    """

    knows_data: bool

    def try_out(self) -> None:
        """Raise a :class:`.ConfigurationError` if it cannot."""


class InnerState:
    """The saving and restoring of the state that belongs to one replica alone.

    The file is safetensors with a checksum, without pickle.

    Args:
        optimizers: The inner optimizers.
        stateful: Further objects whose state is saved, by name.
        names: Names of the model's parameters, by ``id``. Optimizers know their parameters only by
            number; the names make sure that a state is restored to the same parameters.
        own: Objects of the outer loop itself whose state is saved with theirs, by name.
        layout: How the replica lies on several processes, as text; empty if it is one process. A
            state of another layout is of no use.

    Attributes:
        overwritten: Settings of optimizers that the last :meth:`restore` has replaced with saved
            ones, as text. Those that the program gives as in the first incarnation are not among
            them, since it was a schedule, or the program itself, that changed them later.
    """

    def __init__(
        self,
        optimizers: Sequence[Stateful],
        stateful: Mapping[str, Stateful],
        names: Mapping[int, str] | None = None,
        own: Mapping[str, Stateful] | None = None,
        layout: str = "",
    ) -> None:
        for name, holder in stateful.items():
            members = (getattr(holder, name, None) for name in ("state_dict", "load_state_dict"))
            if not all(map(callable, members)):
                raise ConfigurationError(
                    f"stateful[{name!r}] is {kind_of(holder)}, which cannot be saved: pass an "
                    "object with state_dict() and load_state_dict()"
                )
        self._names = names or {}
        self._layout = layout
        self._own_names = frozenset(own or {})  # no concern of the user's
        self.overwritten: list[str] = []
        several = len(optimizers) > 1
        self._holders: dict[str, Stateful] = {
            **{
                f"optimizer.{number}" if several else "optimizer": optimizer
                for number, optimizer in enumerate(optimizers)
            },
            **{f"stateful.{name}": holder for name, holder in stateful.items()},
            **(own or {}),
        }
        # The settings with which the first incarnation of a rank began; later ones keep them.
        self._given = {name: _texts(holder) for name, holder in self._holders.items()}

    def _kinds(self) -> dict[str, str]:
        return {name: type(holder).__name__ for name, holder in self._holders.items()}

    def _parameters(self) -> dict[str, list[list[str]]]:
        """Names of the parameters of every optimizer, group by group."""
        return {
            name: [
                [self._names.get(id(p), "") for p in group["params"]]
                for group in holder.param_groups
            ]
            for name, holder in self._holders.items()
            if isinstance(holder, torch.optim.Optimizer) and not name.startswith("stateful.")
        }

    def try_out(self) -> None:
        """Check that everything can be saved as it is now, and read again.

        Values of tensors are not copied.

        Raises:
            ConfigurationError: Something cannot be saved; the error names it.
        """
        for holder in self._holders.values():
            if isinstance(holder, TriedOut):
                holder.try_out()
        for name, state in self._tree([], trying=True).items():
            try:
                size = len(json.dumps(json.dumps(state)))
                json.loads(json.dumps(state))
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(
                    f"{name} ({type(self._holders[name]).__name__}) cannot be saved as JSON: "
                    f"{type(error).__name__}: {error}"
                ) from error
            check_size(f"{name} ({type(self._holders[name]).__name__})", size, share=0.5)

    def _tree(self, tensors: list[torch.Tensor], *, trying: bool = False) -> dict[str, Any]:
        """All states in a form that JSON can hold.

        Tensors are appended to a list, and take the form of their number in it.
        """
        tree: dict[str, Any] = {}
        for name, holder in self._holders.items():
            if trying and isinstance(holder, TriedOut):
                continue
            try:
                tree[name] = pack(self._state_of(holder), tensors, name)
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{name} ({type(holder).__name__}) cannot be saved: {type(error).__name__}: "
                    f"{error}"
                ) from error
        return tree

    # A process that holds parts of tensors has other ways.
    def _state_of(self, holder: Stateful) -> Any:
        return holder.state_dict()

    def _load(self, holder: Stateful, state: Any) -> None:
        holder.load_state_dict(state)

    def parts(self, inner_steps: int, identity: str, rollback: int = 0) -> Iterator[Buffer]:
        """The bytes of the file. One tensor at a time is copied to the CPU.

        Args:
            inner_steps: The number of inner steps taken when it is saved.
            identity: The run and the key that the file will belong to.
            rollback: Number of the newest rollback in the run's log.

        Raises:
            ConfigurationError: A state is not made of numbers, text, lists, dicts and tensors.
        """
        tensors: list[torch.Tensor] = []
        tree = self._tree(tensors)
        tree["random"] = pack(random_state(), tensors, "random")
        tree["inner_steps"] = inner_steps
        tree["rollback"] = rollback
        tree["kinds"] = self._kinds()
        tree["parameters"] = self._parameters()
        tree["given"] = self._given
        if self._layout:
            tree["layout"] = self._layout
        yield from file_parts(tree, tensors, identity)

    def restore(self, data: bytes, identity: str, origin: str) -> int:
        """Load a saved state that belongs to ``identity``.

        Returns the number of inner steps at which it was saved.

        Raises:
            CorruptedObjectError: The file is damaged, or of another layout.
            FormatError: Another version of diloco-core has written the file.
            ConfigurationError: It was saved with other names in ``stateful``, or with objects of
                other classes, or of other parameters; or an object refuses its saved state.
        """
        tree, tensors = verified(data, identity, origin)
        if (layout := str(tree.get("layout", ""))) != self._layout:
            raise CorruptedObjectError(
                f"{origin} cannot be used: it was saved by a replica of {layout or 'one process'}, "
                f"and this one is {self._layout or 'one process'}"
            )
        saved_names, present_names = tree.keys() - _OTHER_FIELDS, self._holders.keys()
        if saved_names != present_names:
            raise ConfigurationError(
                f"the inner state in {origin} was saved with "
                f"{sorted(saved_names - self._own_names)}, but this replica has "
                f"{sorted(present_names - self._own_names)}: pass the same inner optimizers and "
                "the same stateful= as before"
            )
        if tree["kinds"] != self._kinds():
            differences = ", ".join(
                f"{name} was {tree['kinds'].get(name)} and is {kind}"
                for name, kind in self._kinds().items()
                if tree["kinds"].get(name) != kind
            )
            raise ConfigurationError(
                f"the inner state in {origin} was saved with other classes than this replica has: "
                f"{differences}. Pass objects of the same classes, or begin another run."
            )
        for name, groups in self._parameters().items():
            if tree["parameters"].get(name) != groups:
                raise ConfigurationError(
                    f"the inner state in {origin} was saved when {name} held other parameters, or "
                    "held them in another order or in other groups: give it the same parameters as "
                    "before, in the same order and groups"
                )
        self.overwritten, began = [], tree.get("given", self._given)
        for name, holder in self._holders.items():
            given_settings = _settings(holder)
            try:
                self._load(holder, unpack(tree[name], tensors))
                if isinstance(holder, torch.optim.Optimizer):
                    _lay_out_like_parameters(holder)
                    _move_settings(holder, given_settings)
                    given, self._given[name] = self._given[name], began[name]
                    self.overwritten += _replaced(name, self._given[name], given, _texts(holder))
            except Exception as error:
                raise ConfigurationError(
                    f"{name} ({type(holder).__name__}) refuses the state that is saved in "
                    f"{origin}: {type(error).__name__}: {error}"
                ) from error
        try:
            set_random_state(unpack(tree["random"], tensors))
        except Exception as error:
            raise ConfigurationError(
                f"the random generators refuse the state that is saved in {origin}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return int(tree["inner_steps"])


def _lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give state that has a parameter's shape its strides too, as when the optimizer made it.

    The file holds plain rows.

    Fused optimizers pair elements by their place in memory. With other strides those on CUDA raise,
    and those on the CPU take the momentum of other elements, in silence.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
            continue  # some optimizers keep more there, under names of their own
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if laid_out.stride() != value.stride():
                    state[key] = laid_out.copy_(value)


def _move_settings(optimizer: torch.optim.Optimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Move settings that are tensors to where they were when the optimizer was created.

    One of these is ``lr`` of a capturable optimizer.
    """
    for group, before in zip(optimizer.param_groups, given, strict=True):
        for key, value in before.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key] = group[key].to(value.device)


def _settings(holder: Stateful) -> list[dict[str, Any]]:
    """The settings of an optimizer, group by group; empty for other objects."""
    groups = holder.param_groups if isinstance(holder, torch.optim.Optimizer) else []
    other = {"params", "param_names"}
    return [{key: value for key, value in group.items() if key not in other} for group in groups]


def _texts(holder: Stateful) -> list[dict[str, str]]:
    """The settings of an optimizer as text, group by group; empty for other objects."""
    return [{key: repr(value) for key, value in group.items()} for group in _settings(holder)]


def _replaced(
    name: str,
    began: Sequence[Mapping[str, str]],
    given: Sequence[Mapping[str, str]],
    now: Sequence[Mapping[str, str]],
) -> list[str]:
    """Return the settings that are given otherwise than at the beginning, and stay as saved."""
    return [
        f"{name} group {number}: {key}={holds[key]} (not {value})"
        for number, (first, group, holds) in enumerate(zip(began, given, now, strict=True))
        for key, value in group.items()
        if key in holds and value not in {first.get(key), holds[key]}
    ]
