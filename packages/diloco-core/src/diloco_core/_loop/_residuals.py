"""Error feedback of a whole model: what the codec has lost of this replica's contributions, saved with its own state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .._errors import CorruptedObjectError, FormatError
from .._inner._file import file_parts, verified
from .._inner._packed import pack, unpack
from . import _notices as notices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from .._inner._file import SavedInner
    from .._outer._fragment import Fragment
    from .._store._api import Buffer


_log = logging.getLogger("diloco_core")


class Residuals:
    """The residuals of all fragments, as an object that is saved and restored; see :class:`.Stateful`. Not thread-safe.

    A restored residual holds only at the position at which it was saved, which :meth:`check` finds out. So nothing is sent
    twice, and what is lost is said.

    Attributes:
        advice: What to set so that less is lost, as the end of a message.
    """

    def __init__(self) -> None:
        self.advice = ""
        self._fragments: Sequence[Fragment] = ()

    def watch(self, fragments: Sequence[Fragment]) -> None:
        """Save and restore the residuals of these fragments from now on."""
        self._fragments = [fragment for fragment in fragments if fragment.residual is not None]

    def state_dict(self) -> dict[str, Any]:
        """For every fragment, by name, its residual and the position at which it holds."""
        return {
            fragment.name: {"tag": fragment.residual.tag, "values": list(fragment.residual.values)}
            for fragment in self._fragments
            if fragment.residual is not None
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with saved residuals, as far as they hold."""
        for fragment in self._fragments:
            if fragment.residual is not None:
                saved = state[fragment.name]
                fragment.residual.load(saved["values"], int(saved["tag"]))

    @staticmethod
    def parts(fragment: Fragment) -> Callable[[str], Iterable[Buffer]] | None:
        """Makes the bytes of what a fragment's residual becomes if the contribution that is sent counts; None if none is sent.

        They are saved before the contribution can be counted: after that, this replica may die before it knows.
        """
        offered = None if fragment.residual is None else fragment.residual.offered
        if offered is None:
            return None
        values, tag = offered
        tree: dict[str, Any] = {
            "kinds": {},
            "parameters": {},
            "random": None,
            "rollback": 0,
            "inner_steps": tag,
        }

        def make(identity: str) -> Iterable[Buffer]:
            tensors: list[torch.Tensor] = []
            packed = pack({"values": values}, tensors, "error feedback")
            return file_parts(
                {**tree, "fragment": fragment.name, "residual": packed}, tensors, identity
            )

        return make

    def take(self, saved: Iterable[SavedInner], rank: int, positions: Sequence[int]) -> None:
        """Continue with residuals that were saved before their contributions were sent, where these have been counted.

        Args:
            saved: They.
            rank: The rank of this replica.
            positions: As in :meth:`check`.
        """
        wanted = {
            fragment.name: position
            for fragment, position in zip(self._fragments, positions, strict=bool(self._fragments))
            if fragment.residual is not None and fragment.residual.tag != position
        }
        for each in saved if wanted else ():
            try:
                tree, tensors = verified(each.data, each.identity, each.origin)
                values = unpack(tree["residual"], tensors)["values"]
            except (CorruptedObjectError, FormatError, KeyError, TypeError, ValueError) as error:
                _log.error("rank %d: %s", rank, error)
                continue
            for fragment in self._fragments:
                right = (fragment.name, tree["inner_steps"]) == (
                    tree.get("fragment"),
                    wanted.get(fragment.name),
                )
                if right and fragment.residual is not None and fragment.residual.fits(values):
                    fragment.residual.load(values, int(tree["inner_steps"]))
                    del wanted[fragment.name]

    def check(self, rank: int, positions: Sequence[int], sync: int) -> None:
        """Set residuals to zero that do not hold where this replica begins, and log which ones.

        Args:
            rank: The rank of this replica.
            positions: For every fragment, how many inner steps of this rank are counted in it.
            sync: The number of the newest sync.
        """
        for fragment, position in zip(self._fragments, positions, strict=bool(self._fragments)):
            if fragment.residual is not None and fragment.residual.move(position):
                notices.residual_lost(rank, fragment.name, sync, self.advice)
