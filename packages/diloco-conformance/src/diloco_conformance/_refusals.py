"""Calls that must be refused, with an error of the right kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_protocol import BackendError

from ._check_calls import Calls


def must_raise(
    lab: Calls,
    promise: str,
    what: str,
    call: Callable[[], Any],
    kind: type[BackendError],
    true: str,
) -> None:
    """Make a call that must raise an error of this kind.

    Args:
        lab: The lab.
        promise: The promise that is broken if it does not.
        what: The call in words, such as ``"attach('x')"``.
        call: The call.
        kind: The class of the error that it must raise.
        true: The reason, for the message.
    """
    try:
        gave = lab.within(promise, call)
    except kind:
        return
    except BackendError as error:
        lab.broken(promise, f"{what} raised {error!r}", f"{true}: the error is {kind.__name__}")
    lab.broken(
        promise, f"{what} {'returned' if gave is None else f'gave {str(gave)[:200]!r}'}", true
    )
