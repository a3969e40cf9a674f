"""Error feedback of a whole model: what the codec has lost of this replica's contributions, saved with its own state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _notices as notices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._outer._fragment import Fragment


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
