"""When one simulated incarnation took its inner steps, contributed and adopted syncs: none is lost,
counted twice or sent too early.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from diloco_core._exchange._report import SyncReport
from diloco_core._exchange._resumable import Position
from diloco_core._run._records._keys import Delta, commit_key
from diloco_core._run._records._records import Commit, Rollback


class Adoption(NamedTuple):
    """A sync that an incarnation has adopted.

    Attributes:
        sync: Its number in the log.
        fragment: Its fragment.
        fate: What became of the incarnation's contribution.
        over: Whether all fragments start over, since the incarnation has reloaded or an earlier one
            has taken its steps.
        steps: How many inner steps the incarnation had taken when it adopted the sync.
        last: Whether it trains no more.
        weights: The shares that were reported; None if they are not known.
        lr: The learning rate that was reported.
    """

    sync: int
    fragment: int
    fate: str
    over: bool
    steps: int
    last: bool
    weights: tuple[float, ...] | None
    lr: float | tuple[float, ...] | None


class _Stood(NamedTuple):
    """Where an incarnation stood after a sync: when it had seen its record, and after which inner
    step it had adopted it.
    """

    seen: float
    steps: int


class Timeline:
    """The steps and syncs of one incarnation. One thread at a time.

    Args:
        saw: When the incarnation's process first read each record of the log, by its clock.
        delay: Inner steps from sending to adopting.

    Attributes:
        epoch: The incarnation's epoch; 0 before it has entered.
        boundaries: When each inner step ended, by the number of steps taken then.
        adoptions: The syncs that were adopted since it has entered.
    """

    def __init__(self, saw: Mapping[str, float], delay: int) -> None:
        self.epoch = 0
        self.boundaries: dict[int, float] = {}
        self.adoptions: list[Adoption] = []
        self._saw = saw
        self._delay = delay
        self._entered = 0
        self._left: int | None = None
        # By fragment, the first step that no contribution has claimed, where it is another one.
        self._begins: dict[int, int] = {}
        self._stood: dict[int, _Stood] = {}

    def enters(
        self, position: Position, steps: int, epoch: int, since_sync: Sequence[int] = ()
    ) -> None:
        """The incarnation begins to train after so many steps of its rank, of which some are in no
        sync of a fragment yet.
        """
        self.epoch, self._entered = epoch, steps
        self._begins = {each: steps - open_ for each, open_ in enumerate(since_sync) if open_}
        self._stood[position.sync] = _Stood(position.seen, steps)

    def adopted(self, report: SyncReport, position: Position, steps: int) -> None:
        """A sync was adopted or left out, and the incarnation has taken so many steps now."""
        whole = report.committed and not report.reloaded
        self.adoptions.append(
            Adoption(
                position.sync,
                int(report.fragment),
                report.contribution,
                report.reloaded or bool(report.batches_to_skip),
                steps,
                self._left is not None,
                report.weights if whole else None,
                report.outer_lr,
            )
        )
        self._stood[position.sync] = _Stood(position.seen, steps)

    def leaves(self, steps: int) -> None:
        """Train no more: from here on, contribute what is left, whatever the time."""
        self._left = steps

    def not_tiled(self, claims: Mapping[int, tuple[int, int]]) -> Iterator[str]:
        """Contributions that leave steps out or count them twice.

        What comes between two contributions are the steps that the incarnation took while the first
        of them was under way.

        Args:
            claims: The inner steps of the incarnation's contributions that were counted (first, and
                one past the last), by sync.
        """
        begin = self._entered
        begins = dict(self._begins)
        for adoption in self.adoptions:
            number, now = adoption.fragment, adoption.steps
            if adoption.over:
                begin, begins = now, {}
                continue
            if adoption.fate == "counted":
                first, claim = begins.get(number, begin), claims.get(adoption.sync)
                if claim is None or claim[0] != first:
                    yield (
                        f"sync {adoption.sync} counts steps {claim}, which should begin at {first}"
                    )
                elif now - claim[1] != self._delay and not adoption.last:
                    yield f"sync {adoption.sync} was sent at {claim[1]} and adopted at {now}"
            if adoption.fate not in {"carried", "open"}:
                begins[number] = now

    def not_in_time(self, stops: Mapping[int, int], window: float) -> Iterator[str]:
        """Yield contributions that were not sent at the first step boundary after their window.

        Args:
            stops: How many inner steps the incarnation had taken when it contributed, by sync.
            window: Seconds.
        """
        for sync, stop in stops.items():
            stood = self._stood.get(sync - 1)
            if stood is None or stop not in self.boundaries or stop == self._left:
                continue
            saw = self._saw.get(commit_key(sync - 1), stood.seen)
            if stop <= stood.steps:
                yield (
                    f"sync {sync} was sent after step {stop}, and the one before was adopted "
                    "after it"
                )
            elif self.boundaries[stop] - max(saw, stood.seen) < window:
                yield (
                    f"sync {sync} was sent {window - self.boundaries[stop] + stood.seen:.3g} s "
                    "early"
                )
            before = self.boundaries.get(stop - 1) if stop - 1 > stood.steps else None
            if before is not None and before - stood.seen >= window:
                yield f"sync {sync} could have been sent a step before"


_TOLERANCE = 1e-5


class Mixing:
    """Compares the model of one incarnation, one tensor per fragment, with what it should hold.

    Not thread-safe.

    Args:
        model: The parameters, of which each is a fragment.
        alpha: How much of its own values a replica keeps.

    Attributes:
        wrong: What was not as it should be.
        own: What the model holds: after the step that is about to be taken, until a sync is
            adopted.
        adopted: The newest sync that was adopted.
    """

    def __init__(self, model: Sequence[torch.Tensor], alpha: float) -> None:
        self.wrong: list[str] = []
        self._model = model
        self._alpha = alpha
        self._copies: list[torch.Tensor] = []
        self.own: list[torch.Tensor] = []
        self.adopted = 0

    def begin(self, copies: Sequence[torch.Tensor], sync: int, *, open_steps: bool) -> None:
        """The incarnation begins with these global copies, after this sync; with steps of the
        incarnation before, its model is further on.
        """
        self._copies = [copy.clone() for copy in copies]
        self.own = [each.detach().clone() for each in (self._model if open_steps else copies)]
        self.adopted = sync

    def step(self) -> None:
        """The model is about to take a step of plain SGD with a learning rate of 1."""
        self.own = [
            tensor.detach().clone() - (0 if tensor.grad is None else tensor.grad)
            for tensor in self._model
        ]

    def synced(self, report: SyncReport, copies: Sequence[torch.Tensor], sync: int) -> None:
        """A sync was adopted, or was left out; these are the global copies now, after sync number
        ``sync``.
        """
        index, alpha = int(report.fragment), self._alpha
        wanted = list(self.own)
        old, new = self._copies[index], copies[index]
        if report.reloaded or report.batches_to_skip:
            wanted = [copy.clone() for copy in copies]
        elif report.committed:
            kept = {
                "counted": lambda: torch.lerp(new, self.own[index], alpha),
                "carried": lambda: torch.lerp(new, old, alpha) + self.own[index] - old,
            }
            wanted[index] = kept.get(report.contribution, new.clone)()
        for number, (tensor, values) in enumerate(zip(self._model, wanted, strict=True)):
            far = float((tensor.detach() - values).abs().max())
            if far > _TOLERANCE:
                self.wrong.append(
                    f"after sync {sync}, fragment {number} of its model is {far:.3g} off what "
                    f"{report} should have left"
                )
        self.own = [tensor.detach().clone() for tensor in self._model]
        self._copies, self.adopted = [copy.clone() for copy in copies], sync


PERIOD = 17
"""The gradients of so many steps of an incarnation add up to nothing."""
_LOST = "error feedback of fragment"


class Feedback:
    """The residuals that simulated replicas had. One thread at a time.

    Attributes:
        before: The residual that a contribution would be made with, by (rank, incarnation,
            fragment, step, newest sync adopted then).
        after: The residual after a sync that has counted an incarnation's contribution, by (rank,
            incarnation, sync).
        said: Who has said that a residual was lost, as (rank, incarnation, fragment).
    """

    def __init__(self) -> None:
        self.before: dict[tuple[int, int, int, int, int], torch.Tensor] = {}
        self.after: dict[tuple[int, int, int], torch.Tensor] = {}
        self.said: set[tuple[int, int, int]] = set()

    def note(
        self, rank: int, incarnation: int, fragments: Sequence[Any], step: int, sync: int
    ) -> None:
        """Remember the residuals with which a replica trains on."""
        for number, fragment in enumerate(fragments):
            if fragment.residual is not None:
                self.before[rank, incarnation, number, step, sync] = _values(fragment)

    def counted(self, rank: int, incarnation: int, fragment: Any, sync: int) -> None:
        """Remember the residual after a sync that has counted the replica's contribution."""
        if fragment.residual is not None:
            self.after[rank, incarnation, sync] = _values(fragment)

    @contextmanager
    def listening(self, rank: int, incarnation: int) -> Iterator[None]:
        """Remember what this thread logs as lost."""
        handler = _Listener(threading.get_ident(), rank, incarnation, self.said)
        logger = logging.getLogger("diloco_core")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def of(self, commit: Commit, member: Delta, incarnation: int) -> torch.Tensor | None:
        """The residual with which a contribution was made."""
        key = (member.rank, incarnation, commit.fragment, member.stop, commit.sync - 1)
        return self.before.get(key)

    def explains(self, log: Sequence[Commit | Rollback], salts: dict[tuple[int, int], int]) -> bool:
        """Return whether the residuals say exactly what was decoded of every contribution: what was
        offered less what remained.
        """
        return all(
            (member.rank, salts.get((member.rank, member.epoch), 0), record.sync) in self.after
            for record in log
            if not isinstance(record, Rollback)
            for member in record.members
        )

    def wrong(
        self, log: Sequence[Commit | Rollback], salts: dict[tuple[int, int], int]
    ) -> list[str]:
        """Residuals that were applied twice, or belong to no contribution, or were lost without a
        word.

        Args:
            log: The log of the run.
            salts: Which incarnation of a rank an epoch was.
        """
        # By fragment and rank: the incarnation that was counted last, and what it was left with.
        held: dict[tuple[int, int], tuple[int, torch.Tensor | None]] = {}
        states: dict[tuple[int, int], dict[tuple[int, int], tuple[int, torch.Tensor | None]]] = {}
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
                incarnation = salts.get((member.rank, member.epoch), 0)
                key = record.fragment, member.rank
                before, known = self.of(record, member, incarnation), key in held
                counted, kept = held.get(key, (incarnation, None))
                # An incarnation that was killed or reloaded may not have seen what it was left
                # with: that is not known, but not zero.
                left = self.after.get((member.rank, incarnation, record.sync))
                nothing = (
                    before is not None
                    and not before.any()
                    and not (member.stop - member.start) % PERIOD
                )
                if left is None and nothing:
                    left = before  # what was sent is nothing, of which nothing can be lost
                held[key] = incarnation, left
                if before is None or not before.any():
                    # An incarnation in between may have said it and saved the zero that this one
                    # goes on with.
                    tellers = {incarnation, *range(counted + 1, incarnation)}
                    told = any(
                        (member.rank, teller, record.fragment) in self.said for teller in tellers
                    )
                    lost = known and (kept is None or bool(kept.any()))
                    if before is not None and lost and not told:
                        problems.append(
                            f"rank {member.rank} (incarnation {incarnation}) has lost its residual "
                            f"before sync {record.sync} and said nothing"
                        )
                elif kept is None and any(
                    torch.equal(before, each) for each in applied.get(key, [])
                ):
                    problems.append(
                        f"rank {member.rank} (incarnation {incarnation}) applied a residual in "
                        f"sync {record.sync} that was applied before"
                    )
                elif not known or (kept is not None and not torch.equal(before, kept)):
                    problems.append(
                        f"rank {member.rank} (incarnation {incarnation}) applied a residual in "
                        f"sync {record.sync} that belongs to another state"
                    )
                if before is not None:
                    applied.setdefault(key, []).append(before)
            states[record.fragment, record.sync] = dict(held)
        return problems


class _Listener(logging.Handler):
    def __init__(
        self, thread: int, rank: int, incarnation: int, said: set[tuple[int, int, int]]
    ) -> None:
        super().__init__(logging.WARNING)
        self._key = thread, rank, incarnation
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a loss that this incarnation's thread reports, with rank, fragment and sync."""
        thread, rank, incarnation = self._key
        if _LOST in str(record.msg) and threading.get_ident() == thread:
            assert isinstance(record.args, tuple)
            told, fragment, *_ = record.args
            if told == rank:
                self._said.add((rank, incarnation, int(str(fragment))))


def _values(fragment: Any) -> torch.Tensor:
    assert fragment.residual is not None
    values = fragment.residual.values
    return values[0].clone() if values else torch.zeros(fragment.layout.groups[0].numel)
