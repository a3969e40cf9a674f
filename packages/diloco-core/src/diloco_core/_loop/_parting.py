"""What becomes of a replica of a fixed run when another one has left after fewer syncs, so that there can be no more of them."""

from __future__ import annotations

from .._errors import UnequalSyncsError


class Parting:
    """Whether another replica has left, and what this one learns in vain since then. Not thread-safe."""

    def __init__(self) -> None:
        self._error: UnequalSyncsError | None = None
        self._dropped_steps = 0

    def part(self, error: UnequalSyncsError, dropped_steps: int) -> None:
        """Take note of it, and of inner steps that cannot become part of the model."""
        self._error = copied(error)
        self._dropped_steps += dropped_steps

    def check_sync(self) -> None:
        """Refuse another sync.

        Raises:
            UnequalSyncsError: Another replica has left.
        """
        if self._error is not None:
            raise copied(self._error)

    def check_steps(self, most: int) -> None:
        """Refuse further inner steps once so many were taken in vain.

        Raises:
            UnequalSyncsError: Another replica has left, and this one still trains.
        """
        error = self._error
        if error is None or self._dropped_steps < most:
            return
        raise UnequalSyncsError(
            f"{error} This replica is still training, but nothing that it learns can become part of the model any more. "
            f"Rank {error.rank} has taken fewer inner steps: its gradient scaler may have skipped some, or its data may "
            "have ended. Let all replicas train until `outer.committed` has the same value, or give all of them the same number "
            "of steps.",
            error.rank,
        )


def copied(error: UnequalSyncsError) -> UnequalSyncsError:
    """The same error without the frames that it was raised in, which it would keep in memory."""
    return UnequalSyncsError(str(error), error.rank)
