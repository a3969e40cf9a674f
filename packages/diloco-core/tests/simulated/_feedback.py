"""What the residuals of simulated replicas have to be, by the log: never applied twice, and never lost without a word."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from diloco_core._run._records._records import Rollback

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco_core._outer._fragment import Fragment
    from diloco_core._run._records._keys import Delta
    from diloco_core._run._records._records import Commit

_LOST = "error feedback of fragment"


class Feedback:
    """The residuals that simulated replicas had. One thread at a time.

    Attributes:
        before: The residual that a contribution would be made with, by (rank, life, fragment, step, newest sync adopted then).
        after: The residual after a sync that has counted a life's contribution, by (rank, life, sync).
        said: Who has said that a residual was lost, as (rank, life, fragment).
    """

    def __init__(self) -> None:
        self.before: dict[tuple[int, int, int, int, int], torch.Tensor] = {}
        self.after: dict[tuple[int, int, int], torch.Tensor] = {}
        self.said: set[tuple[int, int, int]] = set()

    def note(
        self, rank: int, life: int, fragments: Sequence[Fragment], step: int, sync: int
    ) -> None:
        """Remember the residuals with which a replica trains on."""
        for number, fragment in enumerate(fragments):
            if fragment.residual is not None:
                self.before[rank, life, number, step, sync] = _values(fragment)

    def counted(self, rank: int, life: int, fragment: Fragment, sync: int) -> None:
        """Remember the residual after a sync that has counted the replica's contribution."""
        if fragment.residual is not None:
            self.after[rank, life, sync] = _values(fragment)

    @contextmanager
    def listening(self, rank: int, life: int) -> Iterator[None]:
        """Remember what this thread logs as lost."""
        handler = _Listener(threading.get_ident(), rank, life, self.said)
        logger = logging.getLogger("diloco_core")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def of(self, commit: Commit, member: Delta, life: int) -> torch.Tensor | None:
        """The residual with which a contribution was made."""
        key = (member.rank, life, commit.fragment, member.stop, commit.sync - 1)
        return self.before.get(key)

    def explains(self, log: Sequence[Commit | Rollback], salts: dict[tuple[int, int], int]) -> bool:
        """Whether the residuals say exactly what was decoded of every contribution: what was offered less what remained."""
        return all(
            (member.rank, salts.get((member.rank, member.epoch), 0), record.sync) in self.after
            for record in log
            if not isinstance(record, Rollback)
            for member in record.members
        )

    def wrong(
        self, log: Sequence[Commit | Rollback], salts: dict[tuple[int, int], int]
    ) -> list[str]:
        """Residuals that were applied twice, or belong to no contribution, or were lost without a word.

        Args:
            log: The log of the run.
            salts: Which life of a rank an epoch was.
        """
        held: dict[tuple[int, int], torch.Tensor | None] = {}  # by fragment and rank
        states: dict[tuple[int, int], dict[tuple[int, int], torch.Tensor | None]] = {}
        applied: dict[tuple[int, int], list[torch.Tensor]] = {}
        problems = []
        for record in log:
            if isinstance(record, Rollback):
                applied.clear()
                held = {
                    key: values
                    for index, sync in enumerate(record.states)
                    for key, values in states.get((index, sync), {}).items()
                    if key[0] == index
                }
                continue
            for member in record.members:
                life = salts.get((member.rank, member.epoch), 0)
                key = record.fragment, member.rank
                before, known, kept = self.of(record, member, life), key in held, held.get(key)
                # A life that was killed or reloaded may not have seen what it was left with: that is not known, but not zero.
                held[key] = self.after.get((member.rank, life, record.sync))
                if before is None or not before.any():
                    told = (member.rank, life, record.fragment) in self.said
                    lost = known and (kept is None or bool(kept.any()))
                    if before is not None and lost and not told:
                        problems.append(
                            f"rank {member.rank} (life {life}) has lost its residual before sync {record.sync} and said nothing"
                        )
                elif kept is None and any(
                    torch.equal(before, each) for each in applied.get(key, [])
                ):
                    problems.append(
                        f"rank {member.rank} (life {life}) applied a residual in sync {record.sync} that was applied before"
                    )
                elif not known or (kept is not None and not torch.equal(before, kept)):
                    problems.append(
                        f"rank {member.rank} (life {life}) applied a residual in sync {record.sync} that belongs to another state"
                    )
                if before is not None:
                    applied.setdefault(key, []).append(before)
            states[record.fragment, record.sync] = dict(held)
        return problems


class _Listener(logging.Handler):
    def __init__(self, thread: int, rank: int, life: int, said: set[tuple[int, int, int]]) -> None:
        super().__init__(logging.WARNING)
        self._key = thread, rank, life
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a loss that this life's thread tells of, naming rank, fragment and sync."""
        thread, rank, life = self._key
        if _LOST in str(record.msg) and threading.get_ident() == thread:
            assert isinstance(record.args, tuple)
            told, fragment, *_ = record.args
            if told == rank:
                self._said.add((rank, life, int(str(fragment))))


def _values(fragment: Fragment) -> torch.Tensor:
    assert fragment.residual is not None
    values = fragment.residual.values
    return values[0].clone() if values else torch.zeros(fragment.layout.groups[0].numel)
