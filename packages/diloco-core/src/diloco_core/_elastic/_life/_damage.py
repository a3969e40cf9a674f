"""What of a run is damaged, as far as one life knows, and what it could write again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .._log._keys import Hint
    from .._log._records import Commit


class Damage:
    """What of the run is damaged, and what this life could write again.

    Loading notes what it found (:meth:`start_over`, :meth:`make_again`), replaying what it has mended (:meth:`mended`), whoever
    comes across more says so (:meth:`distrust`, :meth:`because`), and a sync notes whom it has helped and what it has decided
    (:meth:`is_asked`, :meth:`has_decided`). Everybody else reads.
    """

    def __init__(self) -> None:
        self._mending: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._bad: set[tuple[int, int]] = set()
        self._answered: set[Hint] = set()
        self._decided: Commit | None = None

    @property
    def mending(self) -> Mapping[int, int]:
        """For fragments whose newest state is damaged, after which sync that is; it is made again from the one before."""
        return self._mending

    @property
    def reasons(self) -> Mapping[int, str]:
        """What is damaged of these states, by fragment."""
        return self._reasons

    @property
    def decided(self) -> Commit | None:
        """The last record that this life has created: where it is damaged or lost, it knows what it said."""
        return self._decided

    def is_bad(self, index: int, sync: int) -> bool:
        """Whether a fragment's published state is damaged where loading it does not show."""
        return (index, sync) in self._bad

    def start_over(self) -> None:
        """The state is loaded once more: what is to be mended will be seen on the way."""
        self._mending.clear()

    def make_again(self, index: int, sync: int, reason: str) -> None:
        """The newest state of a fragment is damaged: it is made again from the one before."""
        self._mending[index] = sync
        self._reasons[index] = reason

    def because(self, index: int, reason: str) -> None:
        """A part of a fragment's state is damaged, and is made again at once."""
        self._reasons[index] = reason

    def distrust(self, index: int, sync: int) -> None:
        """Loading this state again would not show that it is damaged."""
        self._bad.add((index, sync))

    def mended(self, index: int, sync: int) -> None:
        """The state of a fragment was made again, and is published as it was."""
        del self._mending[index]
        self._bad.discard((index, sync))

    def is_asked(self, asked: Collection[Hint]) -> bool:
        """Whether somebody asks for repair who was not answered yet; they count as answered from now on."""
        new = set(asked) - self._answered
        self._answered |= new
        return bool(new)

    def has_decided(self, commit: Commit) -> None:
        """This life has created a record."""
        self._decided = commit
