"""Error feedback of a whole model.

It keeps what the codec has lost of this replica's contributions, saved with its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from .._inner._file import SavedInner, file_parts, verified
from .._inner._packed import pack, unpack
from .._outer._fragment import Fragment
from .._outer._residual import Residual
from .._store._api import Buffer
from . import _notices as notices


class Residuals:
    """The residuals of all fragments, as one object to save and restore; see :class:`.Stateful`.

    Not thread-safe.

    A restored residual holds only at the position at which it was saved, which :meth:`check` finds
    out. So nothing is sent twice, and what is lost is said.

    Args:
        advice: What to set so that less is lost, as the end of a message.
    """

    def __init__(self, advice: str = "") -> None:
        self._advice = advice
        self._pairs: Sequence[tuple[Fragment, Residual]] = ()

    def watch(self, fragments: Sequence[Fragment]) -> None:
        """Save and restore the residuals of these fragments from now on."""
        self._pairs = [(each, each.residual) for each in fragments if each.residual is not None]

    def state_dict(self) -> dict[str, Any]:
        """For every fragment, by name, its residual and the position at which it holds."""
        return {
            fragment.name: {"tag": residual.tag, "values": list(residual.values)}
            for fragment, residual in self._pairs
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with saved residuals, as far as they hold."""
        for fragment, residual in self._pairs:
            saved = state[fragment.name]
            residual.load(saved["values"], int(saved["tag"]))

    @staticmethod
    def parts(fragment: Fragment) -> Callable[[str], Iterable[Buffer]] | None:
        """Return a function that makes the bytes of a fragment's residual if what is sent counts.

        None if none is sent.

        They are saved before the contribution can be counted: after that, this replica may die
        before it knows.
        """
        offered = None if fragment.residual is None else fragment.residual.offered
        if offered is None:
            return None
        values, tag = offered
        tensors: list[torch.Tensor] = []
        tree = {
            "kinds": {},
            "parameters": {},
            "random": None,
            "rollback": 0,
            "inner_steps": tag,
            "fragment": fragment.name,
            "residual": pack({"values": values}, tensors, "error feedback"),
        }
        return partial(file_parts, tree, tensors)

    def take(self, saved: Iterable[SavedInner], rank: int, positions: Sequence[int]) -> None:
        """Continue with saved residuals whose contributions have been counted since.

        Args:
            saved: They.
            rank: The rank of this replica.
            positions: As in :meth:`check`.
        """
        wanted = {
            fragment.name: (residual, position)
            for (fragment, residual), position in self._at(positions)
            if residual.tag != position
        }
        for each in saved if wanted else ():
            try:
                tree, tensors = verified(each.data, each.identity, each.origin)
                values = unpack(tree["residual"], tensors)["values"]
            # Whatever these bytes are, this replica goes on without them
            except Exception as error:  # noqa: BLE001
                notices.log.error("rank %d: %s", rank, error)
                continue
            name = str(tree.get("fragment"))
            residual, position = wanted.get(name, (None, 0))
            if residual is not None and tree["inner_steps"] == position and residual.fits(values):
                residual.load(values, position)
                del wanted[name]

    def check(self, rank: int, positions: Sequence[int], sync: int) -> None:
        """Set residuals to zero that do not hold where this replica begins, and log which ones.

        Args:
            rank: The rank of this replica.
            positions: For every fragment, how many inner steps of this rank are counted in it.
            sync: The number of the newest sync.
        """
        for (fragment, residual), position in self._at(positions):
            if residual.move(position):
                lost = (fragment.name, sync, self._advice)
                notices.log.warning(notices.RESIDUAL_LOST, rank, *lost)

    def _at(self, positions: Sequence[int]) -> Iterable[tuple[tuple[Fragment, Residual], int]]:
        return zip(self._pairs, positions, strict=bool(self._pairs))
