"""What an outer loop of a strict run saves and loads: counters, global copy and outer state, and what they belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._checks import is_whole, kind_of
from .._errors import ConfigurationError
from .._exchange._base import Schema
from .._model._values import checksum
from .._wire._sections import fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._model._unsynced import Unsynced
    from .._outer._fragment import Fragment
    from .._outer._optimizer import OuterOptimizer

STATE_VERSION = 3

MAY_CHANGE = frozenset({"sync_every", "init", "flush", "committed"})
"""Settings that a run may go on with other values of, as long as all replicas have the same."""

_SAVED = {
    "settings",
    "tensors",
    "model",
    "committed",
    "inner_steps",
    "since_event",
    "since_sync",
    "stepped",
    "fragments",
    "has_inner_state",
    "digest",
}

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

    def outer_state() -> float:
        return max(
            (fragment.outer.tensors_kept() for fragment in fragments if fragment.outer is not None),
            default=0,
        )

    return Schema(
        tensors, settings, [fragment.table() for fragment in fragments], unsynced, outer_state
    )


def load_fragments(
    state: Mapping[str, Any], pairs: Sequence[tuple[Fragment, OuterOptimizer]]
) -> None:
    """Copy saved global copies and outer state into the fragments; :func:`check_saved` comes before."""
    for (fragment, outer), part in zip(pairs, state["fragments"], strict=True):
        for copy, saved in zip(fragment.copy, part["copy"], strict=True):
            copy.copy_(saved)
        outer.load_state_dict(part["outer"])


def check_saved(
    state: Any,
    identity: Mapping[str, Any],
    settings: Mapping[str, str],
    fragments: Sequence[Fragment],
) -> None:
    """Refuse a saved outer loop that another replica, or one with other settings, has saved.

    Args:
        state: What ``DiLoCo.state_dict`` returned.
        identity: What it must say of the replica.
        settings: The settings of this outer loop. Some of them may have changed; see :data:`MAY_CHANGE`.
        fragments: The fragments of this outer loop.

    Raises:
        ConfigurationError: It names the first difference.
    """
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f"the saved outer loop must be what DiLoCo.state_dict() returned, not {kind_of(state)}"
        )
    for key, value in identity.items():
        _same(key, state.get(key), value)
    missing = sorted(_SAVED - state.keys())
    if missing:
        raise ConfigurationError(
            f"the saved outer loop is incomplete: it has no {missing[0]!r}. Load one that was saved completely."
        )
    if not _is_whole_state(state):
        raise ConfigurationError(
            "the saved outer loop is not as state_dict() returned it: a part of it is missing or of the wrong kind. Load one "
            "that was saved completely."
        )
    for key in [*settings, *(key for key in state["settings"] if key not in settings)]:
        if key not in MAY_CHANGE:
            _same(
                f"setting {key!r}",
                state["settings"].get(key, "absent"),
                settings.get(key, "absent"),
            )
    tensors: dict[str, str] = {}
    for fragment in fragments:
        tensors.update(fragment.schema())
    for name in [*tensors, *(name for name in state["tensors"] if name not in tensors)]:
        _same(f"tensor {name!r}", state["tensors"].get(name, "absent"), tensors.get(name, "absent"))
    copies = [[(copy.numel(), str(copy.dtype)) for copy in fragment.copy] for fragment in fragments]
    saved = [
        [(copy.numel(), str(copy.dtype)) for copy in part["copy"]] for part in state["fragments"]
    ]
    _same("order of tensors", saved, copies)
    if state["digest"] != digest_of(state):
        raise ConfigurationError(
            "the values of the saved outer loop have changed since state_dict() returned them. They are references, which "
            "further training changes: write them to a file at once (torch.save) or copy them (copy.deepcopy). If that was "
            "done, the file is damaged."
        )


def _is_whole_state(state: Mapping[str, Any]) -> bool:
    """Whether what belongs to a saved outer loop is of the right kinds."""
    lists = [state["since_sync"], state["stepped"], state["fragments"], state["has_inner_state"]]
    if not all(isinstance(state[key], Mapping) for key in ("settings", "tensors", "model")):
        return False
    if not all(isinstance(values, list) for values in lists):
        return False
    counters = [
        state["committed"],
        state["inner_steps"],
        state["since_event"],
        *state["since_sync"],
        *state["stepped"],
    ]
    if not all(is_whole(count) and count >= 0 for count in counters):
        return False
    if state["settings"].get("fragments") != str(len(state["fragments"])) or len(
        state["since_sync"]
    ) != len(state["fragments"]):
        return False
    return all(
        isinstance(part, Mapping)
        and isinstance(part.get("copy"), list)
        and all(isinstance(copy, torch.Tensor) for copy in part["copy"])
        and isinstance(part.get("outer"), Mapping)
        and {"ranges", "scalars"} <= part["outer"].keys()
        for part in state["fragments"]
    )


def digest_of(state: Mapping[str, Any]) -> str:
    """A digest of all that a saved outer loop holds, but the digest itself."""
    parts = [
        {
            "copy": [checksum(copy) for copy in part["copy"]],
            "ranges": [
                [[int(number) for number in entry["range"]], _checksums(entry["tensors"])]
                for entry in part["outer"]["ranges"]
            ],
            "scalars": {
                name: float(value) for name, value in sorted(part["outer"]["scalars"].items())
            },
        }
        for part in state["fragments"]
    ]
    return fingerprint(
        sorted((key, state[key]) for key in state if key not in {"fragments", "digest"}), parts
    )


def _checksums(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str | None]]:
    return [(name, checksum(tensor)) for name, tensor in sorted(tensors.items())]


def warn_of_lost_inner_state(
    had: Sequence[bool], optimizers: Sequence[torch.optim.Optimizer], rank: int
) -> None:
    """Say so where an inner optimizer had a state when the outer loop was saved, and has none now.

    Args:
        had: For every inner optimizer, whether it had one.
        optimizers: The inner optimizers.
        rank: This replica.
    """
    lost = [
        type(o).__name__
        for o, before in zip(optimizers, had, strict=False)
        if before and not o.state
    ]
    if lost:
        _log.warning(
            "rank %d: the inner optimizer (%s) had a state when this outer loop was saved, and has none now. Load its "
            "state_dict() too, unless it is meant to start afresh.",
            rank,
            ", ".join(lost),
        )


def check_model(fragments: Sequence[Fragment], saved: Mapping[str, str | None]) -> None:
    """Refuse a model that does not hold what it held when the outer loop's state was saved.

    Args:
        fragments: What of the model is synced.
        saved: What :func:`model_checksums` returned then.

    Raises:
        ConfigurationError: It names tensors that differ, and what is to be loaded.
    """
    here = model_checksums(fragments)
    differing = [name for name in here if here[name] != saved.get(name)]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigurationError(
            "the model does not hold the values that it held when the state of this outer loop was saved. These differ: "
            f"{', '.join(map(repr, differing[:3]))}{more}. Before the block is entered, also load the states of the model "
            "(model.load_state_dict) and of the inner optimizer that were saved at the same moment."
        )


def model_checksums(fragments: Sequence[Fragment]) -> dict[str, str | None]:
    """A checksum of what the model holds in every synced tensor."""
    return {
        named.name: checksum(named.tensor)
        for fragment in fragments
        for named in fragment.followed()
    }


def _same(what: str, saved: object, here: object) -> None:
    if saved != here:
        if str(saved) == str(here):  # such as 2 and '2'
            saved, here = f"{saved!r} ({kind_of(saved)})", f"{here!r} ({kind_of(here)})"
        raise ConfigurationError(
            f"the saved outer loop does not fit: its {what} is {saved}, here it is {here}"
        )
