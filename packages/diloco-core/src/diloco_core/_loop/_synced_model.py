"""The model of an outer loop, and the state of the loop that is saved and loaded.

This says which of its tensors are synced in which fragment, and whether it is still the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._arithmetic._coded import CodedUpdates
from .._arithmetic._layout import Rule
from .._checks import kind_of
from .._errors import ConfigurationError
from .._exchange._base import Exchange, Schema
from .._exchange._schemas import MAY_CHANGE
from .._model._frozen import FrozenValues
from .._model._partition import Buffers, NamedTensor
from .._model._unsynced import Unsynced
from .._model._values import checksum, compared_tensors, named_buffers, plain_name
from .._model._watch import ModelWatch
from .._outer._delayed import DelayedFragment
from .._outer._fragment import Fragment
from .._outer._optimizer import OuterOptimizer, check_settings
from .._outer._residual import Residual
from .._terms._support import check_process_group, support_of
from .._terms._terms import Terms
from .._wire._sections import fingerprint
from . import _notices as notices
from ._counters import Counters


@dataclass(eq=False)
class SyncedModel:
    """The fragments of a model. The set of synced tensors is fixed. Not thread-safe.

    Args:
        model: The model.
        parts: The tensors of every fragment; see :func:`.._model._partition.split`.
        buffers: What happens to its buffers.
        optimizers: The inner optimizers.
        exchange: The exchange over which they are synced.
        terms: What the replicas agree on.

    Attributes:
        fragments: The fragments, in the order in which they are synced.
        trained: The tensors that the outer optimizers update.
        settings: What must be the same on all replicas, apart from the tensors.

    Raises:
        ConfigurationError: Tensors share memory without being tied, or the optimizers and the model
            do not hold the same parameters.
    """

    model: torch.nn.Module
    parts: Sequence[Sequence[NamedTensor]]
    buffers: Buffers
    optimizers: Sequence[torch.optim.Optimizer]
    exchange: Exchange
    terms: Terms

    def __post_init__(self) -> None:
        model, parts, terms = self.model, self.parts, self.terms
        outers = [OuterOptimizer(terms.groups) for _ in parts]
        self._outer_settings = outers[0].settings
        check_settings(outers, self._outer_settings)
        self.settings = {**terms.settings, **self._outer_settings}
        schedule, coding = terms.schedule, terms.coding
        # With error feedback the contribution is computed once: what is sent and what remains must
        # belong together.
        kind = DelayedFragment if schedule.delay or schedule.alpha or terms.feedback else Fragment
        if coding is not None:
            outers[0].check_state_codec(coding.codec.name)
        self.fragments = [
            kind(
                str(number),
                tensors,
                outer,
                self.exchange.shards(sum(tensor.wire_bytes for tensor in tensors)),
                terms,
                coding and CodedUpdates(coding.codec, coding.full_every, len(parts)),
                elastic=support_of(self.exchange).takes_run,
            )
            for number, (tensors, outer) in enumerate(zip(parts, outers, strict=True))
        ]
        for fragment in self.fragments if terms.feedback else ():
            fragment.residual = Residual(
                fragment.layout, terms.codec, terms.feedback, self.exchange.rank, fragment.locate
            )
        # Made only to raise now what would otherwise be raised when the block is entered.
        Unsynced(model, [named for part in parts for named in part])
        self.trained = [named for part in parts for named in part if named.rule is Rule.OUTER]
        synced = self.buffers is not Buffers.NONE
        self._watch = ModelWatch(model, self.optimizers, buffers_are_synced=synced)
        self._frozen = FrozenValues(self._watch.frozen)

    def check(self) -> None:
        """Refuse a model whose tensors are no longer the synced ones.

        Modules may have assigned new tensors to buffers.

        Raises:
            ModelChangedError: The model has changed, or the values of a frozen parameter have.
            ConfigurationError: The process has become one of several that train together.
        """
        check_process_group(self.exchange)
        check_settings([each.outer for each in self.fragments], self._outer_settings)
        buffers = self._watch.check()
        self._frozen.check()
        for fragment in self.fragments:
            fragment.follow(buffers)

    def check_frozen(self) -> None:
        """Compare the values of all frozen parameters, of which :meth:`check` compares only some.

        Raises:
            ModelChangedError: The values of one have changed.
        """
        self._frozen.check(everything=True)

    @property
    def outer(self) -> OuterOptimizer:
        """One of the outer optimizers: all have the same settings."""
        return self.fragments[0].outer

    def synced(self) -> dict[str, torch.Tensor]:
        """The tensors that are synced, by name."""
        return {named.name: named.tensor for named in self.followed()}

    def held(self) -> dict[str, torch.Tensor]:
        """All tensors of the model by name, including the synced ones."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        return {**self.synced(), **self._watch.parameters, **buffers}

    def tensors(self) -> dict[str, str]:
        """Descriptions of the synced tensors, by name."""
        return {
            name: line for fragment in self.fragments for name, line in fragment.schema().items()
        }

    def schema(self, committed: int, *, values: bool) -> Schema:
        """A description of everything that replicas must have in common.

        Frozen parameters must keep their values from now on.

        Args:
            committed: The outer steps that the model has taken.
            values: Whether the values of the global copies must be equal too.
        """
        tensors, sums = compared_tensors(self.model, self._watch.frozen)
        self._frozen.remember(sums)
        tensors.update(self.tensors())
        if values:
            for fragment in self.fragments:
                for name, digest in fragment.digests().items():
                    tensors[name] += f" with values {digest}"
        return Schema(
            tensors,
            {**self.settings, "committed": str(committed)},
            [fragment.table() for fragment in self.fragments],
            Unsynced(self.model, self.followed()),
            self.outer.tensors_kept,
            self.terms,
        )

    def followed(self) -> list[NamedTensor]:
        """The tensors that are synced, as they are in the model now."""
        return [named for fragment in self.fragments for named in fragment.followed()]

    def committed(self) -> list[tuple[NamedTensor, torch.Tensor]]:
        """The same tensors, each with its last committed values."""
        return [pair for fragment in self.fragments for pair in fragment.committed()]

    @torch.no_grad()
    def put_committed(self) -> None:
        """Write the last committed values into the model."""
        for named, values in self.committed():
            named.tensor.copy_(values)

    def committed_copies(self) -> dict[str, torch.Tensor]:
        """Copies of the last committed values, and of what is not synced, as a plain model's state.

        They are on the CPU, and tied tensors are one.
        """
        tensors = dict[str, torch.Tensor](self.model.named_parameters(remove_duplicate=False))
        tensors |= named_buffers(self.model, persistent=True)
        committed = {id(named.tensor): values for named, values in self.committed()}
        copies = {
            id(each): committed.get(id(each), each.detach()).to("cpu", each.dtype, copy=True)
            for each in tensors.values()
        }
        return {plain_name(self.model, name): copies[id(each)] for name, each in tensors.items()}


STATE_VERSION = 4


@dataclass(eq=False)
class SavedState:
    """What an outer loop saves and loads. Not thread-safe.

    Args:
        model: The model, with the settings that must be the same on all replicas, the inner
            optimizers, and the exchange, whose rank and world size the state must be of.
        count: The inner and outer steps of this replica.

    Attributes:
        loaded: The state that was loaded, without the values of the fragments; None if none was.
    """

    model: SyncedModel
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
            "has_inner_state": [bool(optimizer.state) for optimizer in self.model.optimizers],
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
        had = zip(self.model.optimizers, self.loaded["has_inner_state"], strict=False)
        lost = [type(each).__name__ for each, had_state in had if had_state and not each.state]
        if lost:
            rank = self.model.exchange.rank
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
            "rank": self.model.exchange.rank,
            "world_size": self.model.exchange.world_size,
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
