"""The model of an outer loop.

This says which of its tensors are synced in which fragment, and whether it is still the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._arithmetic._coded import CodedUpdates
from .._arithmetic._layout import Rule
from .._exchange._base import Exchange, Schema
from .._model._frozen import FrozenValues
from .._model._partition import Buffers, NamedTensor
from .._model._unsynced import Unsynced
from .._model._values import compared_tensors
from .._model._watch import ModelWatch
from .._outer._delayed import DelayedFragment
from .._outer._fragment import Fragment
from .._outer._optimizer import OuterOptimizer, check_settings
from .._outer._residual import Residual
from .._terms._support import check_process_group, support_of
from .._terms._terms import Terms


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
        synced_buffers = [named for named in parts[-1] if named.rule is not Rule.OUTER]
        watched = None if self.buffers is Buffers.NONE else synced_buffers
        self._watch = ModelWatch(model, self.optimizers, watched)
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
        return {named.name: named.tensor for named in self._followed()}

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
            Unsynced(self.model, self._followed()),
            self.outer.tensors_kept,
            self.terms,
        )

    def _followed(self) -> list[NamedTensor]:
        return [named for fragment in self.fragments for named in fragment.followed()]
