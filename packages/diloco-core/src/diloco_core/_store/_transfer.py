"""Limits for requests to a store behind a network: how many at once, and in how much memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from .._checks import whole
from .._errors import ConfigurationError

BLOCK_BYTES = 8 * 2**20
"""Largest range that one request reads: large enough to hide the latency of a request."""
PART_BYTES = 5 * 2**20
"""Bytes of the parts in which larger objects are uploaded, several at a time.

Objects up to this size are uploaded in one request. In the same memory, small parts are quicker,
since more connections can be used. S3 does not accept smaller ones.
"""
CONNECTIONS = 16
"""Number of requests under way at the same time."""
BUDGET_BYTES = 80 * 2**20
"""Bytes for ranges that were fetched and not read yet, and for all that is being transferred."""

_LEAST_BLOCK_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Transfer:
    """Set how much a replica transfers at once from and to a store behind a network.

    Each replica may have its own settings.

    Nothing is sent to and from folders: settings other than the defaults are refused there.

    Attributes:
        connections: The most reads that are under way at the same time, and the most parts of one
            upload, each with a file descriptor and a thread; 16. A few more requests may be under
            way besides: small ones of the training thread, signs of life, and when a run begins,
            several objects that are uploaded in parts.
        block_bytes: The most bytes that one request reads; 8 MiB. With larger blocks there are
            fewer requests.
        budget_bytes: Memory in bytes for what is read ahead and for uploads that are under way; 80
            MiB. It has to hold two blocks, and two parts of an upload (5 MiB each). In the gather
            topology, where every replica also keeps all of the outer state, reads take three tenths
            of it, in blocks of half the size.

    Raises:
        ConfigurationError: A setting is not a whole number of at least 1, or cannot work in any
            process. The error names it, what was given and what would work.
    """

    connections: int = CONNECTIONS
    block_bytes: int = BLOCK_BYTES
    budget_bytes: int = BUDGET_BYTES

    def __post_init__(self) -> None:
        for name in ("connections", "block_bytes", "budget_bytes"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.block_bytes < _LEAST_BLOCK_BYTES:
            raise ConfigurationError(
                f"block_bytes must be at least {_LEAST_BLOCK_BYTES} (64 KiB), not "
                f"{self.block_bytes}: each block takes a request, so smaller ones would be slow"
            )
        least = 2 * max(self.block_bytes, PART_BYTES)
        if self.budget_bytes < least:
            advice = (
                " Raise it, or make block_bytes smaller." if self.block_bytes > PART_BYTES else ""
            )
            raise ConfigurationError(
                f"budget_bytes must be at least {least}, not {self.budget_bytes}: it has to hold "
                f"two blocks ({self.block_bytes} bytes each) and two parts of an upload "
                f"({PART_BYTES} bytes each).{advice}"
            )

    def check(self) -> None:
        """Refuse more connections than this process can open.

        Raises:
            ConfigurationError: There are too many. The error says how many there were and how many
                would work.
        """
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY and self.connections > files // 2:
            raise ConfigurationError(
                f"connections must be at most {files // 2}, not {self.connections}: each one needs "
                f"a file descriptor, and half of the {files} that this process may have are kept "
                "for everything else. Use fewer connections, or raise the limit (ulimit -n)."
            )

    def gather_budget(self) -> int:
        """Return the memory in bytes for reading ahead in the gather topology.

        There, every replica also keeps all of the outer state.
        """
        return self.budget_bytes * 3 // 10

    def gather_block(self) -> int:
        """Return how many bytes of a contribution are read at once in the gather topology.

        The next contribution is read after these. One such block of sums is kept in memory.
        """
        return self.block_bytes // 2

    def least_upload(self) -> int:
        """Bytes that one upload may hold even if less of the budget is free."""
        return self.budget_bytes // 2


def creates_at_once(transfer: Transfer) -> int:
    """Return how many objects are created at the same time while others are read.

    This is for drivers that need no memory for that.
    """
    return max(1, transfer.connections * 3 // 8)


def parts_at_once(transfer: Transfer, free: int, copies: int = 1, least: int | None = None) -> int:
    """Return how many parts of an upload are under way at the same time.

    The one that is being made does not count.

    Args:
        transfer: The store's settings.
        free: Bytes of the budget that are not in use.
        copies: How often a part is held in memory.
        least: Bytes that the upload may hold even if fewer are free; if left out, those of an
            upload that is alone.
    """
    least = transfer.least_upload() if least is None else least
    fitting = max(free, least) // (copies * PART_BYTES) - 1
    return max(1, min(fitting, transfer.connections))
