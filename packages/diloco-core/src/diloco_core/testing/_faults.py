"""What can go wrong at an operation of a simulated store."""

from __future__ import annotations

from dataclasses import dataclass

from .._checks import one_of

KINDS = (
    "kill before",
    "kill after",
    "tear",
    "lose request",
    "lose answer",
    "delay",
    "repeat",
    "jump",
    "zombie",
    "flip",
    "stale list",
)
"""What can happen at an operation, and leaves the store as it was written; see :class:`Fault`."""

DAMAGES = ("rot", "torn record")
"""What can happen at an operation, and leaves a damaged object; see :class:`Fault`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at one store operation of one life.

    Attributes:
        rank: Whose.
        life: In which life of the rank, from 1.
        operation: At which of its operations, from 1.
        kind: One of ``KINDS``, which leave the store as it was written, or of ``DAMAGES``, which leave a damaged object:

            * ``"kill before"``: the process dies before the operation takes effect.
            * ``"kill after"``: it dies when the operation has taken effect.
            * ``"tear"``: it dies in the middle of an upload; a plain put leaves a truncated object.
            * ``"lose request"``: an error, and the operation has not taken effect.
            * ``"lose answer"``: an error, but the operation has taken effect.
            * ``"delay"``: it takes long.
            * ``"repeat"``: the network delivers a write again, later.
            * ``"jump"``: the process's clock jumps forward.
            * ``"zombie"``: the process hangs for long, is taken for dead and replaced, and then goes on.
            * ``"flip"``: the next reading brings one flipped bit; what lies in the store is whole.
            * ``"stale list"``: the next listing is as it was some seconds ago.
            * ``"rot"``: an object in the store, other than the manifest, gets a flipped bit or is cut short.
            * ``"torn record"``: the process dies in a write, and a part of the object is visible, whatever it was.
        seconds: How long, for what takes time.

    Raises:
        ConfigurationError: The kind is not known, so that it would never happen.
    """

    rank: int
    life: int
    operation: int
    kind: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, (*KINDS, *DAMAGES))
