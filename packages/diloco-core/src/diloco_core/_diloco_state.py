"""What an outer loop saves and loads: its own state by hand (strict runs), a replica's inner state by itself (elastic)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._errors import ConfigurationError, CorruptedObjectError
from ._exchange import Schema
from ._inner_state import InnerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._exchange_elastic import ElasticExchange
    from ._fragment import Fragment
    from ._inner_state import Stateful
    from ._outer import OuterOptimizer
    from ._unsynced import Unsynced

STATE_VERSION = 1

_log = logging.getLogger("diloco_core")


def describe(
    fragments: Sequence[Fragment],
    settings: Mapping[str, str],
    compared: Mapping[str, str],
    unsynced: Unsynced,
    *,
    values: bool,
) -> Schema:
    """What replicas must have in common: settings, tensors, and with ``values`` also what the global copies hold.

    ``compared`` are further lines, of tensors that are not synced.
    """
    tensors: dict[str, str] = dict(compared)
    for fragment in fragments:
        tensors.update(fragment.schema())
    if values:
        for fragment in fragments:
            for name, digest in fragment.digests().items():
                tensors[name] += f" with values {digest}"
    return Schema(tensors, settings, [fragment.table() for fragment in fragments], unsynced)


def load_fragments(
    state: Mapping[str, Any], identity: Mapping[str, Any], pairs: Sequence[tuple[Fragment, OuterOptimizer]]
) -> None:
    """Copy saved global copies and outer state into the fragments.

    Args:
        state: What ``DiLoCo.state_dict`` returned.
        identity: What it must say of the replica.
        pairs: The fragments and their outer optimizers.

    Raises:
        ConfigurationError: It was saved by another rank, world size, version or model.
    """
    here = {**identity, "fragments": [[(c.numel(), str(c.dtype)) for c in f.copy] for f, _ in pairs]}
    there = {key: state.get(key) for key in identity}
    there["fragments"] = [[(c.numel(), str(c.dtype)) for c in part["copy"]] for part in state.get("fragments", [])]
    for key, value in here.items():
        if there[key] != value:
            raise ConfigurationError(
                f"the saved outer loop does not fit: its {key} is {there[key]}, here it is {value}"
            )
    for (fragment, outer), part in zip(pairs, state["fragments"], strict=True):
        for copy, saved in zip(fragment.copy, part["copy"], strict=True):
            copy.copy_(saved)
        outer.load_state_dict(part["outer"])


class OwnState:
    """When a replica of an elastic run saves what belongs to it alone, and what it gets back.

    Args:
        optimizers: The inner optimizers.
        stateful: More things to save, by name.
        every: Every how many syncs; 0 for never.

    Attributes:
        behind: Inner steps that the run has counted since what was restored had been saved (all, where nothing was).
        overtaken: The run has counted steps of this rank that this life never took, so its data loader does not stand where
            the counted steps end. Nothing is saved from then on: the rank's next life takes what was saved before, and
            passes over what was counted since.

    Raises:
        ConfigurationError: Something cannot be saved.
    """

    def __init__(self, optimizers: Sequence[Stateful], stateful: Mapping[str, Stateful], every: int) -> None:
        self.behind = 0
        self.overtaken = False
        self._inner = InnerState(optimizers, stateful)
        self._every = every
        self._saved_at = 0

    def restore(self, exchange: ElasticExchange, sync: int, inner_steps: int) -> None:
        """Take over what the rank's earlier lives have saved last."""
        self.behind = inner_steps
        for data, origin in exchange.saved_inner() if self._every else ():
            try:
                self.behind = max(0, inner_steps - self._inner.restore(data, origin))
                break
            except CorruptedObjectError as error:
                _log.error("%s. This replica goes on with what was saved before, or with a fresh inner state.", error)
        self._saved_at = sync

    def save(self, exchange: ElasticExchange, sync: int, inner_steps: int, *, leaving: bool = False) -> None:
        """Save it, if it is time; not while something that was learned is still to be counted, or it could be lost."""
        due = sync - self._saved_at >= (1 if leaving else self._every)
        if self._every and due and exchange.counted >= inner_steps and not self.overtaken:
            exchange.save_inner(lambda: self._inner.parts(inner_steps))
            self._saved_at = sync
