"""How much is under way at once between a replica and a store behind a network, and in how much memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from .._checks import whole
from .._errors import ConfigurationError

BLOCK_BYTES = 8 * 2**20
"""Largest range that is asked for at once: large enough to hide the latency of a request."""
PART_BYTES = 5 * 2**20
"""Objects up to this size are one request; larger ones go up in parts of about this size, several at a time.

In the same memory small parts are quicker, since there are more connections then. S3 takes no smaller ones.
"""
CONNECTIONS = 16
"""Requests under way at the same time."""
BUDGET_BYTES = 80 * 2**20
"""Memory for ranges that were fetched and not read yet, and for all that is on its way."""

_LEAST_BLOCK_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Transfer:
    """How a replica reads from and writes to a store behind a network. Each replica may have its own.

    Folders and ``memory://`` have no use for it: there it is checked, and makes no difference.

    Attributes:
        connections: Most reads under way at the same time, and most parts of one upload, each with a file descriptor and a
            thread; 16. There are some more requests where several things happen at once: small ones of the training thread,
            signs of life, and when a run begins, several objects that go up in parts of their own.
        block_bytes: Most bytes that one request reads; 8 MiB. Larger blocks are fewer requests.
        budget_bytes: Memory for what is read ahead and for uploads on their way; 80 MiB. It has to hold two blocks, and two parts
            of an upload (5 MiB each). In the gather topology, where every replica keeps all of the outer state as well, reads
            take three tenths of it, in blocks of half the size.

    Raises:
        ConfigurationError: One of them is not a whole number of at least 1.
    """

    connections: int = field(default_factory=lambda: CONNECTIONS)
    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)
    budget_bytes: int = field(default_factory=lambda: BUDGET_BYTES)

    def __post_init__(self) -> None:
        for name in ("connections", "block_bytes", "budget_bytes"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))

    def check(self) -> None:
        """Refuse what cannot work in this process.

        Raises:
            ConfigurationError: It names the setting, what was given and what would work.
        """
        self.check_memory()
        files = most_files()
        if files is not None and self.connections > files // 2:
            raise ConfigurationError(
                f"connections must be at most {files // 2}, not {self.connections}: each needs a file descriptor, and of the "
                f"{files} that this process may have, half are left for everything else. Use fewer, or raise the limit "
                "(ulimit -n)."
            )

    def check_memory(self) -> None:
        """Refuse what cannot work in any process.

        Raises:
            ConfigurationError: It names the setting, what was given and what would work.
        """
        if self.block_bytes < _LEAST_BLOCK_BYTES:
            raise ConfigurationError(
                f"block_bytes must be at least {_LEAST_BLOCK_BYTES} (64 KiB), not {self.block_bytes}: every block is a request"
            )
        least = 2 * max(self.block_bytes, PART_BYTES)
        if self.budget_bytes < least:
            advice = (
                " Raise it, or make block_bytes smaller." if self.block_bytes > PART_BYTES else ""
            )
            raise ConfigurationError(
                f"budget_bytes must be at least {least}, not {self.budget_bytes}: it has to hold two blocks "
                f"({self.block_bytes} bytes each) and two parts of an upload ({PART_BYTES} bytes each).{advice}"
            )

    def gather_budget(self) -> int:
        """Memory for reading ahead where every replica keeps all of the outer state as well."""
        return self.budget_bytes * 3 // 10

    def gather_block(self) -> int:
        """How much of a contribution is read before the next one's turn there. Sums are held for a block."""
        return self.block_bytes // 2

    def least_upload(self) -> int:
        """What one upload may hold however little of the budget is free."""
        return self.budget_bytes // 2


def most_files() -> int | None:
    """How many file descriptors this process may have; None where that is not limited or not known."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None
