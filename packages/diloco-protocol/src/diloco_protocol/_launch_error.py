"""The error of a failed launch; it carries the handles of replicas that are still running."""

from __future__ import annotations

from collections.abc import Sequence

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
