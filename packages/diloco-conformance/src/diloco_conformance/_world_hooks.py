"""Methods that a harness adds if its world can do it, and otherwise declares in ``cannot``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that the platform was asked for on behalf of one replica, in a launch's words.

    Attributes:
        cpu: CPUs; None if nothing was asked for.
        memory: Bytes; None if nothing was asked for.
        gpu: Model and number, such as ``"H100:2"``; ``"any:2"`` if any model will do; None for no
            GPU.
        spot: Whether interruptible capacity was asked for; None if nothing was said about it.
    """

    cpu: float | None = None
    memory: int | None = None
    gpu: str | None = None
    spot: bool | None = None


class WorldHooks:
    """The methods of a :class:`Harness` that may be missing, if ``cannot`` says why."""

    def resources(self, handle: ReplicaHandle) -> Resources:
        """Return what the platform's own records say was asked for on behalf of a replica."""
        raise NotImplementedError(self._missing("resources"))

    def lose(self, handle: ReplicaHandle, left: bytes | None = None) -> None:
        """Lose the result of a successful replica; leave ``left`` in its place, or nothing if None.

        The record that it has succeeded stays. Where a result can only be lost, Ability.DAMAGE is
        in ``cannot``.
        """
        raise NotImplementedError(self._missing("lose"))

    def foreign(self, name: str) -> None:
        """Put something that diloco has not launched where a run of this name would be."""
        raise NotImplementedError(self._missing("foreign"))

    def remove(self, handle: ReplicaHandle) -> None:
        """Begin to remove a run that has ended, as another user might.

        The removal is under way until :meth:`settle`.
        """
        raise NotImplementedError(self._missing("remove"))

    def between(self, action: Callable[[], None]) -> None:
        """Have the world call ``action`` once, after the next call that lists a page of runs."""
        raise NotImplementedError(self._missing("between"))

    def _missing(self, hook: str) -> str:
        return f"{type(self).__name__} has no {hook}(); declare Ability.{hook.upper()} in cannot"
