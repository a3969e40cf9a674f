"""Our outer loop over a torchft-shaped manager.

Such a manager averages tensors, votes, and decides who takes part.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import xxhash

from .._arithmetic._layout import CHUNK_BYTES, Piece, Rule
from .._arithmetic._sharded import checked
from .._arithmetic._sync_job import SyncJob
from .._checks import check_identity
from .._errors import ConfigurationError, MismatchError
from .._exchange._base import Schema
from .._exchange._in_memory import ExchangeInMemory
from .._exchange._pending import Pending, Steps
from .._outer._fragment import Fragment
from .._outer._initial import Initial
from .._terms._support import Support
from .._timing import Timing
from .._wire._sections import view
from ._manager import Manager, MockManager

_log = logging.getLogger("diloco_core")

_MEMBERS = (
    "start_quorum",
    "allreduce",
    "should_commit",
    "allow_state_dict_read",
    "disallow_state_dict_read",
    "current_step",
)
_STATE_KEY = "diloco_core.ManagerExchange"


class ManagerExchange(ExchangeInMemory):
    """Our outer loop over a torchft-shaped manager; see :class:`._base.Exchange`.

    Every replica averages everything and takes the whole outer step itself. The manager decides who
    takes part, and votes on the commit. A sync that it refuses does not change the global copy and
    the outer state, and takes the model back to the global copy: the report says
    ``committed=False`` and ``contribution="dropped"``, and so does the log (level warning).

    At every sync the replicas compare their settings, the names, shapes and dtypes of the model's
    tensors, the values that are not synced, and the global copy of the fragment. A manager can only
    average, so the error says in which of these the replicas differ and what this replica has, but
    not which replica differs. Over a :class:`MockManager`, they are also compared when the block is
    entered, with errors that name rank and tensor, and all replicas take rank 0's initial values.

    Other managers do not distribute rank 0's values, so the replicas have to begin with the same
    ones, unless the manager heals at the first step (``init_sync=True`` in torchft): a replica that
    it heals takes over the initial values of the replica that it is healed from, and what it has
    learned before is dropped. All replicas have to begin together. A replica that the manager
    brings to a later step is refused; the others go on without it.

    Args:
        manager: ``torchft.Manager`` (``use_async_quorum=False``) or an object with its members.
        rank: This replica's number, for reports and errors only.
        world_size: The number of replicas, for reports only.

    Raises:
        ConfigurationError: ``manager`` lacks a member or uses asynchronous quorums, or a number is
            not allowed.
    """

    # A manager may heal the replica when a step begins, which changes the model.
    support = Support(delays=True, compares_lr=True, lanes=True, begins_behind=False)

    def __init__(self, manager: Manager, *, rank: int = 0, world_size: int = 1) -> None:
        missing = [name for name in _MEMBERS if not callable(getattr(manager, name, None))]
        if missing:
            raise ConfigurationError(
                f"{manager!r} is not a manager, since it does not have {', '.join(missing)}: pass "
                "a torchft.Manager or a MockManager"
            )
        if getattr(manager, "_use_async_quorum", False):
            raise ConfigurationError(
                "the manager uses asynchronous quorums, in which a replica takes part before it "
                "has been healed: make the manager with use_async_quorum=False, as torchft's own "
                "DiLoCo requires, too"
            )
        super().__init__(*check_identity(rank, world_size), Timing(), CHUNK_BYTES)
        self._manager = manager
        self._items: list[Compared] = []
        self._fragments: list[Fragment] = []
        self._committed = 0
        self._job: SyncJob | None = None
        self._healed = False

    def _schemas(self, schema: Schema) -> tuple[Schema, Sequence[Schema]]:
        # A MockManager compares them when the replicas meet. With other managers they meet at every
        # sync, and compare there.
        if isinstance(self._manager, MockManager):
            self._manager.meet(schema)
        elif callable(getattr(self._manager, "register_state_dict_fn", None)):
            self._manager.register_state_dict_fn(_STATE_KEY, self._heal, self._state)
        self._items = compared(schema)
        return schema, ()

    # The manager knows who takes part
    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:  # noqa: ARG002
        """Meet the replicas that take part.

        ``finish()`` compares, averages, votes and updates.

        Raises:
            MismatchError: By ``finish()``: the replicas differ in what must be equal, or the others
                are further than this one.
        """
        return self._begun(job, nullcontext)

    def _sync(self, job: SyncJob) -> Steps:
        clock = self._timing.clock
        start = clock()
        sums = [] if job.kind == "initial" else self._start_step(job)
        begun = clock() - start
        yield
        start = clock() - begun
        committed, contribution = True, "counted"
        if job.kind == "initial":
            self._begin(job)
        else:
            committed = self._average_and_apply(job, sums)
            contribution = "counted" if committed and not self._healed else "dropped"
        report = self._finished(job, sent=0, received=0, waited=0.0, since=start)
        members = self.world_size if committed else 0
        return replace(report, committed=committed, members=members, contribution=contribution)

    def shards(self, size: int) -> int:  # noqa: ARG002 - the signature of Exchange
        """The number of shards is one: every replica updates everything."""
        return 1

    def leave(self) -> None:
        """Nothing to do: the manager belongs to the caller."""

    def abort(self, error: BaseException) -> None:  # noqa: ARG002 - a manager cannot be told
        """Give up a sync that is under way.

        The manager belongs to the caller, and is not told of the error.
        """
        self._syncs.give_up()

    def _begin(self, job: SyncJob) -> None:
        if isinstance(job, Initial):
            if any(group.rule is Rule.FIRST for group in job.fragment.layout.groups):
                raise ConfigurationError(
                    "a torchft manager can only average, but integer buffers are taken from rank 0 "
                    "(with buffers='rank0', all buffers are): pass buffers='none'"
                )
            self._fragments.append(job.fragment)
        if isinstance(self._manager, MockManager):
            self._manager.exchange.sync(job)  # it is not an average: all take the values of rank 0

    def _average_and_apply(self, job: SyncJob, sums: Sequence[torch.Tensor]) -> bool:
        layout = job.layout
        copies = compared_copy(job, self._committed) if job.kind == "outer" else []
        self._manager.disallow_state_dict_read()
        try:
            committed = self._average_and_vote([*self._items, *copies], sums)
            for shard in range(layout.shards):
                for chunk in layout.chunks(shard, CHUNK_BYTES):
                    if committed:
                        new = job.update(chunk, sums[chunk.group][chunk.start : chunk.stop])
                        job.check_update(chunk, new, self._progress.next)
                        job.adopt(chunk, new)
                    elif (values_before := job.destination(chunk)) is not None:
                        job.adopt(chunk, values_before)
        finally:
            self._manager.allow_state_dict_read()
        self._committed += committed
        if not committed:
            _log.warning(
                "rank %d: the manager has voted against the sync of fragment %s after %d outer "
                "steps. What this replica has learned in the fragment since its last sync is "
                "dropped, and the fragment goes back to the values of that sync. The log of the "
                "manager says why.",
                self.rank,
                job.name,
                self._committed,
            )
        return committed

    def _average_and_vote(self, items: Sequence[Compared], sums: Sequence[torch.Tensor]) -> bool:
        """Compare, average if all replicas agree, and vote. Returns whether the step counts."""
        mean = numbers(items)
        # The comparison comes first, since sums of replicas that differ may differ in size.
        self._manager.allreduce(mean).wait()
        difference = first_difference(items, mean)
        if difference is None:
            for work in [self._manager.allreduce(total) for total in sums]:
                work.wait()
        # Managers hide errors of averages until the vote. If it is no, the averages mean nothing.
        committed = self._manager.should_commit()
        if committed and difference is not None:
            raise MismatchError(
                f"the replicas of this manager differ in the {difference.name}. Rank {self.rank} "
                f"has {difference.shown()}. Each replica raises this error and shows what it has: "
                f"compare these errors. {difference.advice}"
            )
        return committed

    def _start_step(self, job: SyncJob) -> list[torch.Tensor]:
        """Meet the replicas that take part.

        Meanwhile the manager may heal this replica. Returns what it contributes.
        """
        layout = job.layout
        sums = [
            torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in layout.groups
        ]
        for shard in range(layout.shards):
            for chunk in layout.chunks(shard, CHUNK_BYTES):
                values = checked(job, chunk, self.rank, self._scratch)
                sums[chunk.group][chunk.start : chunk.stop].copy_(values)
        self._job, self._healed = job, False
        step = self._manager.current_step()
        self._manager.start_quorum()
        reached = self._manager.current_step()
        if reached != step:
            raise MismatchError(
                f"rank {self.rank} has come too late: it was at step {step} of the manager, and "
                f"the others are at step {reached}. Over a torchft manager all replicas have to "
                "begin together, since the manager does not transfer the outer optimizer's state. "
                "The others go on without this one. If replicas are to come later, or to come "
                "back, use connect(..., min_replicas=...)."
            )
        if self._healed:
            for total in sums:
                total.zero_()  # what this replica has learned started from other values
            _log.warning(
                "rank %d: the manager has healed this replica, which goes on with the initial "
                "values of another one. What it had learned before is dropped.",
                self.rank,
            )
        return sums

    def give_up(self) -> None:
        """Make a sync that another thread carries out end soon, over a :class:`MockManager`.

        Other managers cannot do this.
        """
        if isinstance(self._manager, MockManager):
            self._manager.exchange.give_up()

    def _state(self) -> list[list[torch.Tensor]]:
        return [list(fragment.copy) for fragment in self._fragments]

    def _heal(self, state: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take over another replica's global copies.

        The manager calls this inside ``start_quorum``.
        """
        if [[_kind(copy) for copy in copies] for copies in state] != [
            [_kind(copy) for copy in copies] for copies in self._state()
        ]:
            return  # it is another model, which the following comparison reports
        for fragment, received in zip(self._fragments, state, strict=True):
            if all(map(torch.equal, fragment.copy, received)):
                continue
            for copy, values in zip(fragment.copy, received, strict=True):
                copy.copy_(values)
            if fragment is self._job:
                self._healed = True  # the model takes the new values at the end of the sync
            else:
                fragment.start_over()


def _kind(copy: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return copy.shape, copy.dtype


_VALUES = " with values "
_SYNCED = " in fragment "
_DIGEST_BYTES = 8
# Far above the rounding error of an average of squared bytes, and far below what one replica in a
# million changes in it.
_TOLERANCE = 1e-7
_SHOWN = 400


class Compared(NamedTuple):
    """An item that must be equal at all replicas.

    Attributes:
        name: What errors call it.
        value: The whole item as text.
        advice: What to do if the replicas differ in it.
    """

    name: str
    value: str
    advice: str

    def shown(self) -> str:
        """The value as errors show it: whole if it is short, or its beginning and its digest."""
        if len(self.value) <= _SHOWN:
            return self.value
        return f"{self.value[:_SHOWN]}… (digest {xxhash.xxh3_64_hexdigest(self.value.encode())})"


def compared(schema: Schema) -> list[Compared]:
    """The items in which the schemas of all replicas must be equal."""
    lines = {name: line.partition(_VALUES) for name, line in schema.tensors.items()}
    shapes = {name: shape for name, (shape, _, _) in lines.items()}
    values = {name: digest for name, (_, _, digest) in lines.items() if digest}
    initial = {name: digest for name, digest in values.items() if _SYNCED in shapes[name]}
    frozen = {name: digest for name, digest in values.items() if name not in initial}
    load = (
        "Load the same checkpoint on all replicas before the block is entered, or build the model "
        "from the same seed."
    )
    return [
        Compared(
            "settings", json.dumps(dict(schema.settings)), "Give all replicas the same arguments."
        ),
        Compared(
            "names, shapes or dtypes of the model's tensors",
            json.dumps(shapes),
            "Build the same model on all replicas.",
        ),
        Compared(
            "values of frozen parameters, or of buffers that are not saved",
            json.dumps(frozen),
            load,
        ),
        Compared("initial values of the model", json.dumps(initial), load),
    ]


def compared_copy(job: SyncJob, committed: int) -> list[Compared]:
    """Return the items that must be equal at all replicas when a fragment is synced.

    They are the name of the fragment, its global copy and its learning rates.

    Args:
        job: The sync.
        committed: The number of outer steps that this replica has taken.
    """
    digest = xxhash.xxh3_64()
    pieces = (Piece(index, 0, group.numel) for index, group in enumerate(job.layout.groups))
    for values in map(job.destination, pieces):
        if values is not None:
            digest.update(view(values))
    advice = (
        "Load the same checkpoint on all replicas, or build the model from the same seed: a "
        "manager brings the initial values only to replicas that it heals at the first step "
        "(init_sync=True in torchft)."
        if not committed
        else "Some replicas have taken outer steps that others have not. Start all replicas again "
        "from the same checkpoint."
    )
    place = f"fragment {job.name} after {committed} outer steps"
    rates = ", ".join(map(repr, job.rate.values))
    return [
        Compared(
            "fragment that is synced", f"{place} (digest of its tensors: {job.fingerprint})", advice
        ),
        Compared(
            "values from which they have trained", f"{place}: digest {digest.hexdigest()}", advice
        ),
        Compared(
            "outer learning rate",
            f"{rates or 'none'} for outer step {committed + 1}",
            (
                "outer_lr must return the same number on all replicas for the same outer step: a "
                "manager only averages."
            ),
        ),
    ]


def numbers(items: Sequence[Compared]) -> torch.Tensor:
    """Return the numbers to average: a row for each item, in float64.

    A row has the eight bytes of the item's digest, and their squares.
    """
    digest_bytes = [byte for item in items for byte in xxhash.xxh3_64_digest(item.value.encode())]
    tensor = torch.tensor(digest_bytes, dtype=torch.float64, device="cpu").view(
        len(items), _DIGEST_BYTES
    )
    return torch.cat([tensor, tensor * tensor], dim=1)


def first_difference(items: Sequence[Compared], mean: torch.Tensor) -> Compared | None:
    """The first item in which not all replicas are equal; None if they are equal in all.

    Args:
        items: The items of this replica.
        mean: The average of all replicas' :func:`numbers`.
    """
    agrees = ((mean - numbers(items)).abs() < _TOLERANCE).all(dim=1)  # NaN does not agree
    return next((item for item, same in zip(items, agrees.tolist(), strict=True) if not same), None)
