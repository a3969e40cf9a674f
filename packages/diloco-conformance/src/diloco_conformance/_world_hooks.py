"""What a harness adds, if its world can do it, and otherwise declares in ``cannot``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle


@dataclass(frozen=True, slots=True)
class Resources:
    """What the platform was asked for on behalf of one replica, in the words of a launch.

    Attributes:
        cpu: CPUs; None if nothing was asked for.
        memory: Bytes; None if nothing was asked for.
        gpu: Model and number, such as ``"H100:2"``; ``"any:2"`` where the model is all the same;
            None for no GPU.
        spot: Whether interruptible capacity was asked for; None if nothing was said of it.
    """

    cpu: float | None = None
    memory: int | None = None
    gpu: str | None = None
    spot: bool | None = None


class WorldHooks:
    """The methods of a :class:`Harness` that need not be there, if ``cannot`` says why."""

    def resources(self, handle: ReplicaHandle) -> Resources:
        """What the platform's own records say was asked for on behalf of a replica."""
        raise NotImplementedError(self._missing("resources"))

    def lose(self, handle: ReplicaHandle, left: bytes | None = None) -> None:
        """Lose the result of a replica that has succeeded; ``left`` is found in its place, None: nothing is.

        The record that it has succeeded stays. Where a result can only be lost, Ability.DAMAGE is
        in ``cannot``.
        """
        raise NotImplementedError(self._missing("lose"))

    def foreign(self, name: str) -> None:
        """Put something that was not launched by diloco where a run of this name would be."""
        raise NotImplementedError(self._missing("foreign"))

    def remove(self, handle: ReplicaHandle) -> None:
        """Have somebody else begin to remove a run that has ended; it is under way until :meth:`settle`."""
        raise NotImplementedError(self._missing("remove"))

    def between(self, action: Callable[[], None]) -> None:
        """Have the world call ``action``, once, after it has answered the next call that lists a page of the runs."""
        raise NotImplementedError(self._missing("between"))

    def _missing(self, hook: str) -> str:
        return f"{type(self).__name__} has no {hook}(); declare Ability.{hook.upper()} in cannot"
