"""What an outer loop of a fixed run saves and loads: counters, global copy and outer state. Checks of a saved state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._arithmetic._rate import Rate
from .._checks import is_whole, kind_of
from .._errors import ConfigurationError
from .._exchange._schemas import MAY_CHANGE
from .._model._values import checksum
from .._wire._sections import fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._outer._fragment import Fragment
    from .._outer._groups import OuterGroups
    from .._outer._optimizer import OuterOptimizer

STATE_VERSION = 4

_SAVED = {
    "settings",
    "tensors",
    "model",
    "committed",
    "inner_steps",
    "since_event",
    "since_sync",
    "outer_lr",
    "tokens",
    "stepped",
    "fragments",
    "has_inner_state",
    "digest",
}

_log = logging.getLogger("diloco_core")


def load_fragments(
    state: Mapping[str, Any], pairs: Sequence[tuple[Fragment, OuterOptimizer | OuterGroups]]
) -> None:
    """Copy saved global copies and outer state into the fragments. Call :func:`check_saved` first."""
    counts = zip(pairs, state["fragments"], state["since_sync"], strict=True)
    for (fragment, outer), part, since_sync in counts:
        for copy, saved in zip(fragment.copy, part["copy"], strict=True):
            copy.copy_(saved)
        outer.load_state_dict(part["outer"])
        if fragment.residual is not None:
            fragment.residual.load(part["residual"], int(state["inner_steps"]) - int(since_sync))


def check_saved(
    state: Any,
    identity: Mapping[str, Any],
    settings: Mapping[str, str],
    fragments: Sequence[Fragment],
) -> None:
    """Refuse a saved state that belongs to another replica or another model, or to an outer loop with other settings.

    Args:
        state: What ``DiLoCo.state_dict`` returned.
        identity: What the state must say about the replica.
        settings: The settings of this outer loop. Some of them may have changed; see :data:`MAY_CHANGE`.
        fragments: The fragments of this outer loop.

    Raises:
        ConfigurationError: It names the first difference.
    """
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f"the saved state of an outer loop must be what DiLoCo.state_dict() returned, not {kind_of(state)}"
        )
    for key, value in identity.items():
        _same(key, state.get(key), value)
    missing = sorted(_SAVED - state.keys())
    if missing:
        raise ConfigurationError(
            f"the saved state of the outer loop is incomplete: {missing[0]!r} is missing. Load a state that is as state_dict() "
            "returned it."
        )
    if not _is_whole_state(state):
        raise ConfigurationError(
            "the saved state of the outer loop is not as state_dict() returned it: a part of it is missing or of the wrong "
            "kind. Load a state that was saved completely."
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
    for fragment, part in zip(fragments, state["fragments"], strict=True):
        if fragment.residual is not None and not fragment.residual.fits(part.get("residual")):
            raise ConfigurationError(
                f"the saved state of the outer loop has no residual that fits fragment {fragment.name}, although it was saved "
                "with error feedback. Load a state that is as state_dict() returned it."
            )
    if state["digest"] != digest_of(state):
        raise ConfigurationError(
            "the values in the saved state of the outer loop have changed since state_dict() returned them. They are references "
            "to the loop's own tensors, which further training changes: write the state to a file at once (torch.save) or copy "
            "it (copy.deepcopy). If that was done, the file is damaged; load another one."
        )


def _is_whole_state(state: Mapping[str, Any]) -> bool:
    """Whether all parts of a saved state are of the right kinds."""
    lists = [
        state[key] for key in ("since_sync", "tokens", "stepped", "fragments", "has_inner_state")
    ]
    if not all(isinstance(state[key], Mapping) for key in ("settings", "tensors", "model")):
        return False
    if not all(isinstance(values, list) for values in lists):
        return False
    if not isinstance(state["outer_lr"], str) or Rate.parse(state["outer_lr"]) is None:
        return False
    counters = [
        state["committed"],
        state["inner_steps"],
        state["since_event"],
        *state["since_sync"],
        *state["tokens"],
        *state["stepped"],
    ]
    if not all(is_whole(count) and count >= 0 for count in counters):
        return False
    count = len(state["fragments"])
    if state["settings"].get("fragments") != str(count):
        return False
    if not len(state["since_sync"]) == len(state["tokens"]) == count:
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
    """A digest of everything in a saved state except the digest itself."""
    parts = [
        {
            "copy": [checksum(copy) for copy in part["copy"]],
            # Without error feedback nothing is added, so that states of earlier versions have the digest that they had.
            **(
                {"residual": [checksum(values) for values in part["residual"]]}
                if "residual" in part
                else {}
            ),
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
    """Log a warning if an inner optimizer had a state when the outer loop was saved, and has none now.

    Args:
        had: For every inner optimizer, whether it had a state then.
        optimizers: The inner optimizers.
        rank: The rank of this replica.
    """
    lost = [
        type(optimizer).__name__
        for optimizer, had_state in zip(optimizers, had, strict=False)
        if had_state and not optimizer.state
    ]
    if lost:
        _log.warning(
            "rank %d: the inner optimizer (%s) had a state when this outer loop was saved, and has none now. Load its "
            "state_dict() too, unless it is meant to start from the beginning.",
            rank,
            ", ".join(lost),
        )


def check_model(fragments: Sequence[Fragment], saved: Mapping[str, str | None]) -> None:
    """Refuse a model that does not hold the values that it held when the outer loop's state was saved.

    Args:
        fragments: The fragments of the model.
        saved: What :func:`model_checksums` returned then.

    Raises:
        ConfigurationError: It names tensors that differ, and says what to load.
    """
    checksums = model_checksums(fragments)
    differing = [name for name in checksums if checksums[name] != saved.get(name)]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigurationError(
            "the model does not hold the values that it held when the state of this outer loop was saved. These differ: "
            f"{', '.join(map(repr, differing[:3]))}{more}. Before the block is entered, also load the states of the model "
            "(model.load_state_dict) and of the inner optimizer that were saved at the same moment."
        )


def model_checksums(fragments: Sequence[Fragment]) -> dict[str, str | None]:
    """A checksum of the model's values in every synced tensor, by the tensor's name."""
    return {
        named.name: checksum(named.tensor)
        for fragment in fragments
        for named in fragment.followed()
    }


def _same(what: str, saved: object, current: object) -> None:
    if saved != current:
        if str(saved) == str(current):  # such as 2 and '2'
            saved = f"{saved!r} ({kind_of(saved)})"
            current = f"{current!r} ({kind_of(current)})"
        raise ConfigurationError(
            f"the saved state does not fit this outer loop: {what} is {saved} in the saved state, but {current} in this outer "
            "loop. Load a state that this rank has saved with the same model, the same settings and the same version."
        )
