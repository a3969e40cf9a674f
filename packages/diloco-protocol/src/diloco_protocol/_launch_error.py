"""Launches that fail: what they have started is taken back, and their error names the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ._errors import BackendError
from ._handle import ReplicaHandle


class LaunchError(BackendError):
    """Raised when a launch failed after it began.

    Attributes:
        survivors: Replicas that were started and could not be stopped again. Empty if nothing is
            left running.
    """

    def __init__(self, message: str, survivors: Sequence[ReplicaHandle] = ()) -> None:
        super().__init__(message)
        self.survivors = tuple(survivors)


@contextlib.contextmanager
def all_or_nothing(
    take_back: Callable[[BaseException], tuple[Sequence[ReplicaHandle], str]],
) -> Iterator[None]:
    """Take back what the block has started if it fails or is interrupted.

    Args:
        take_back: Called with the error. Ends what this launch has started; returns the replicas
            that may still be running, and what to say of them.

    Raises:
        LaunchError: The block failed, and replicas may be running.
        BaseException: The block's own error, if no replica is left or the block was interrupted. A
            LaunchError of the block is raised as it is, and nothing is taken back.
    """
    try:
        yield
    except LaunchError:
        raise
    except BaseException as error:
        survivors, words = take_back(error)
        if survivors and isinstance(error, Exception):
            raise LaunchError(f"{error}. {words}", survivors) from error
        if survivors:
            error.add_note(words)
        raise
