"""Which parts of a run are damaged, as far as one life knows, and which of them it could write again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .._records._keys import Hint
    from .._records._records import Commit


class Damage:
    """Which parts of the run are damaged, and which of them this life could write again.

    Loading records the damage that it meets (:meth:`start_over`, :meth:`make_again`), and replaying the log records what it has
    mended (:meth:`mended`). All code that meets more damage records it (:meth:`distrust`, :meth:`because`). A sync records
    which requests for repair it has answered and which record it has created (:meth:`is_asked`, :meth:`has_decided`). All
    other code only reads.
    """

    def __init__(self) -> None:
        self._mending: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._bad: dict[tuple[int, int], str] = {}
        self._answered: set[Hint] = set()
        self._decided: Commit | None = None

    @property
    def mending(self) -> Mapping[int, int]:
        """The fragments whose newest state is damaged, with the sync of that state. It is made again from the state before."""
        return self._mending

    @property
    def reasons(self) -> Mapping[int, str]:
        """What is wrong with damaged states, by fragment."""
        return self._reasons

    @property
    def decided(self) -> Commit | None:
        """The last record that this life has created, so that it can write that again if it is damaged or lost."""
        return self._decided

    def found(self, index: int, sync: int) -> str:
        """What is wrong with a fragment's published state in a part that loading it does not read; empty if nothing is."""
        return self._bad.get((index, sync), "")

    def start_over(self) -> None:
        """Forget what has to be mended: the state is loaded once more, which will show it again."""
        self._mending.clear()

    def make_again(self, index: int, sync: int, reason: str) -> None:
        """Note that the newest state of a fragment is damaged, and has to be made again from the state before."""
        self._mending[index] = sync
        self._reasons[index] = reason

    def because(self, index: int, reason: str) -> None:
        """Note what is wrong with a part of a fragment's state that is being made again right now."""
        self._reasons[index] = reason

    def distrust(self, index: int, sync: int, why: object) -> None:
        """Note that this state is damaged although loading it would not show that."""
        self._bad[index, sync] = str(why).rstrip(".")

    def mended(self, index: int, sync: int) -> None:
        """Note that the state of a fragment was made again and is published as it was before."""
        del self._mending[index]
        self._bad.pop((index, sync), None)

    def is_asked(self, asked: Collection[Hint]) -> bool:
        """Whether these requests for repair include one that was not answered yet. All of them count as answered from now on."""
        unanswered = set(asked) - self._answered
        self._answered |= unanswered
        return bool(unanswered)

    def has_decided(self, commit: Commit) -> None:
        """Note that this life has created this record."""
        self._decided = commit
