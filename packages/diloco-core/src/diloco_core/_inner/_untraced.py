"""Hooks that torch.compile does not trace: it would compile the syncs that they start, and stop at something in them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_REASON = (
    "an outer loop (DiLoCo) counts the steps of this optimizer and syncs between them, outside of compiled code: compile "
    "the step without fullgraph=True"
)
_NAMES = frozenset({"untraced_hook", "_fn"})


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """A function that does the same, and is left out where torch.compile traces the code that calls it.

    It costs next to nothing where nothing is compiled.
    """
    # Every optimizer has imported torch's compiler already, which takes a second.
    says_why = "reason" in inspect.signature(torch.compiler.disable).parameters  # not in torch 2.6
    outside = torch.compiler.disable(function, **({"reason": _REASON} if says_why else {}))  # type: ignore[no-untyped-call]

    def untraced_hook(*arguments: Any) -> None:
        if torch.compiler.is_compiling():
            outside(*arguments)
        else:
            function(*arguments)

    return untraced_hook


def is_of_a_wrapper(frame: FrameType) -> bool:
    """Whether a frame belongs to what :func:`untraced` has put around a function."""
    return frame.f_code.co_name in _NAMES
