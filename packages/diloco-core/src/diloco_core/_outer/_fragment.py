"""One fragment of a model: its global copy, and what it contributes to a sync and takes from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from .._arithmetic._coded import RESIDUAL, CodedUpdates, Encoded, encode_update
from .._arithmetic._contribution import Contribution
from .._arithmetic._layout import Layout, Piece, Rule
from .._arithmetic._rate import NO_RATE, Rate
from .._errors import NonFiniteUpdateError
from .._model._partition import NamedTensor
from .._model._segments import Segment, Segments, arrange, ready, tensor_table
from .._terms._terms import DEFAULT, Terms
from .._wire._sections import fingerprint, view
from ._optimizer import OuterOptimizer
from ._residual import Residual


@dataclass(eq=False)
class Fragment:
    """A fragment as a :class:`._resumable.ResumableJob`. Not thread-safe.

    It holds the global copy, on the CPU, and the outer state of this replica's shards. The
    contribution is the pseudo-gradient: what the model held after the last sync, minus what it
    holds now. For a model in bf16 or fp16, "what it held" is the rounded global copy: the rounding
    is not progress of the replica, and counting it would undo every outer step that is too small
    for the model's dtype.

    Args:
        name: Its name in reports and in the store.
        tensors: The tensors that it consists of.
        outer: Its outer optimizer; one without groups if none of its tensors takes an outer step.
        shards: The number of shards into which it is cut.
        terms: What the replicas agree on.
        coded: How its state is published, if that is encoded.
        elastic: Whether it belongs to an elastic run, so that errors can say what to do there.

    Attributes:
        terms: As given.
        residual: What the codec has lost of earlier contributions; None without error feedback.
        contribution: What this replica brings to the sync under way, or brought to the last one.
        rate: The learning rate of the outer step that is taken, or was taken last; see
            :class:`.SyncJob`.
    """

    name: str
    tensors: Sequence[NamedTensor]
    outer: OuterOptimizer
    shards: int
    terms: Terms = DEFAULT
    coded: CodedUpdates | None = None
    elastic: bool = field(default=False, kw_only=True)
    residual: Residual | None = field(default=None, init=False)
    rate: Rate = field(default=NO_RATE, init=False)

    kind = "outer"
    _detached = False  # whether the exchange must not touch the model: see DelayedFragment

    def __post_init__(self) -> None:
        terms, coded = self.terms, self.coded
        self.contribution = Contribution()
        self._adopted = False
        groups, placed = arrange(self.tensors)
        self._segments = Segments(placed)
        self.starts, self.locate = self._segments.starts, self._segments.locate
        self.outer.groups = [segments[0].named.outer_group or 0 for segments in placed]
        self.keeps_outer = self.outer.keeps
        self.outer_state, self.outer_scalars = self.outer.tensors, self.outer.scalars
        block = terms.codec.block
        if coded is not None:
            block = math.lcm(block, coded.codec.block)
        self.layout = Layout(groups, self.shards, block)
        self._wholes = [Piece(index, 0, group.numel) for index, group in enumerate(groups)]
        self.copy = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in groups]
        # The norms are a part of the file of a contribution, so a file without them must not be
        # taken for one with them.
        clipped = ["clip"] if terms.clip else []
        self.fingerprint = fingerprint("fragment", self.name, self.shards, self.schema(), *clipped)

    @property
    def alpha(self) -> float:
        """The share of its own values that the replica keeps when it adopts a sync, from 0 to 1."""
        return self.terms.schedule.alpha

    def schema(self) -> dict[str, str]:
        """The description of each tensor by its name."""
        codec = self.terms.codec
        sent = "" if codec.plain else f", sent as {codec.name}"
        return {
            named.name: f"{named.describe()} in fragment {self.name}{sent}"
            for named in self.tensors
        }

    def digests(self) -> dict[str, str]:
        """The checksum of each tensor's global copy by its name."""
        return {
            segment.named.name: xxhash.xxh3_64_hexdigest(view(base))
            for segment, base in self._bases()
        }

    def _bases(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Every tensor, with its part of the global copy."""
        for copy, segments in zip(self.copy, self._segments.placed, strict=True):
            for segment in segments:
                yield segment, copy[segment.start : segment.stop]

    def take_snapshot(self) -> None:
        """Set the global copy to what the model holds."""
        self.begin()
        for segment, base in self._bases():
            base.copy_(ready(segment))
        self.finish()

    def start_over(self) -> None:
        """Set the model to the global copy, and so forget what was learned since the last sync."""
        self.begin()
        for whole, values in zip(self._wholes, self.copy, strict=True):
            self.adopt(whole, values)
        self.finish()

    def settle(self) -> list[str]:
        """Set tensors that have changed since the last sync back to the global copy.

        Returns the names of the parameters.
        """
        changed = []
        self.begin()
        for segment, base in self._bases():
            local = ready(segment)
            # Compared as bytes, since buffers may hold NaN.
            held, synced = (each.view(torch.uint8) for each in (local.cpu(), base.to(local.dtype)))
            if not torch.equal(held, synced):
                local.copy_(base)
                if segment.named.rule is Rule.OUTER:
                    changed.append(segment.named.name)
        self.finish()
        return changed

    def follow(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Sync these tensors under their names from now on.

        Modules may have replaced their buffers with new tensors.
        """
        for segment in self._segments:
            tensor = buffers.get(segment.named.name, segment.named.tensor)
            if tensor is not segment.named.tensor:
                segment.named = replace(segment.named, tensor=tensor)

    def followed(self) -> list[NamedTensor]:
        """The tensors that it consists of, as they are in the model now."""
        return [segment.named for segment in self._segments]

    def committed(self) -> Iterator[tuple[NamedTensor, torch.Tensor]]:
        """The same tensors, each with its last committed values."""
        for segment, base in self._bases():
            yield segment.named, base.view(segment.named.tensor.shape)

    def begin(self) -> None:
        """Make flat views of the model's tensors.

        A tensor that is not contiguous is copied until :meth:`finish`.
        """
        if not self._detached:
            self._adopted = False
            self._segments.begin()

    def depart(self) -> None:
        """Prepare for a sync, which uses the model's values until :meth:`arrive` is called."""
        self.begin()

    def arrive(self, fate: str) -> None:  # noqa: ARG002 - the exchange has done what there is to do
        """End a sync: its values are in the model already."""
        self.finish()

    def finish(self) -> None:
        """Write copied tensors back.

        If new values were adopted, delete the gradients, which belong to the old values.
        """
        if not self._detached:
            self._segments.finish(adopted=self._adopted)

    def contributed(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """The pseudo-gradient of a piece; for buffers, their values."""
        return self._contribution(piece, self._segments.overlaps(piece), out)

    def _contribution(
        self, piece: Piece, held: Iterable[tuple[torch.Tensor, int, int]], out: torch.Tensor
    ) -> torch.Tensor:
        """Return the contribution of a replica that holds these values.

        Each of them comes with where in the group it starts and stops.
        """
        is_outer = self._is_outer(piece)
        for local, start, stop in held:
            base = self.copy[piece.group][start:stop]
            whole = stop - start == piece.stop - piece.start
            if not is_outer and whole and local.data_ptr() == base.data_ptr():
                return local
            part = out if whole else out[start - piece.start : stop - piece.start]
            if not is_outer:
                part.copy_(local)
                if local.dtype is not base.dtype and not self.must_be_finite(piece):
                    # As with parameters, the rounding of the last mean to the model's dtype does
                    # not count as a change.
                    torch.where(base.to(local.dtype).to(base.dtype) == part, base, part, out=part)
                continue
            if local.dtype is not base.dtype:
                base = base.to(local.dtype).to(base.dtype)
            torch.sub(base, local.to("cpu", base.dtype), out=part)
        return out

    def unchanged(self) -> Collection[int]:
        """The groups of buffers that are still as in the global copy."""
        return [
            whole.group
            for whole in self._wholes
            if not self._is_outer(whole)
            and self._is_unchanged(whole.group, self._segments.overlaps(whole))
        ]

    def _is_unchanged(self, group: int, held: Iterable[tuple[torch.Tensor, int, int]]) -> bool:
        copy = self.copy[group]
        return all(
            view(local.cpu()) == view(copy[start:stop].to(local.dtype))
            for local, start, stop in held
        )

    def update(self, piece: Piece, reduced: torch.Tensor) -> torch.Tensor:
        """Take the outer step on the global copy. Buffers just take the reduced values."""
        values = self.destination(piece)
        if self._is_outer(piece):
            self.outer.use(self.rate.values)
            old = None if self.coded is None else values.clone()
            self.outer.step(piece, values, reduced)
            if self.coded is not None and old is not None:
                self._encode_update(self.coded, piece, old)
        else:
            values.copy_(reduced)
        return values

    def _encode_update(self, coded: CodedUpdates, piece: Piece, old: torch.Tensor) -> None:
        """Encode what an outer step did to a chunk, and hold what all replicas will read."""
        codec, state = coded.codec, self.outer.tensors(piece)
        residual_name = self.outer.name_of(piece, RESIDUAL)
        residual = state.pop(residual_name, None)
        update = encode_update(codec, old, self.destination(piece), residual)
        if update is None:
            return  # check_update() raises the error
        encoded = {name: codec.encode(values) for name, values in state.items()}
        for name, data in encoded.items():
            codec.decode(data, state[name])
        self.outer.keep(piece, RESIDUAL, update.residual)
        coded.chunks[piece] = Encoded(update.data, {**encoded, residual_name: update.left})

    def must_be_finite(self, piece: Piece) -> bool:
        """Say whether the piece takes an outer step."""
        return self._is_outer(piece)

    def _is_outer(self, piece: Piece) -> bool:
        return self.layout.groups[piece.group].rule is Rule.OUTER

    def check_update(self, piece: Piece, values: torch.Tensor, sync: int) -> None:
        """Refuse an outer step that leaves NaN or infinity in the model or the outer state.

        The model's values are checked in the model's dtype.

        Raises:
            NonFiniteUpdateError: The step is refused; the error names the tensor.
        """
        if not self.must_be_finite(piece):
            return
        wrong = self._segments.not_finite(piece, values)
        if wrong is None and (index := self.outer.not_finite(piece)) is not None:
            wrong = self.locate(piece, index), values.dtype
        if wrong is not None:
            raise NonFiniteUpdateError(*wrong, sync, self.outer.lr(piece), elastic=self.elastic)

    def destination(self, piece: Piece) -> torch.Tensor:
        """The global copy of a piece."""
        return self.copy[piece.group][piece.start : piece.stop]

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Set the model to ``values``, rounded to the model's dtype."""
        if self._detached:
            return  # arrive() does it
        self._adopted = True
        for local, start, stop in self._segments.overlaps(piece):
            whole = stop - start == piece.stop - piece.start
            part = values if whole else values[start - piece.start : stop - piece.start]
            if part.data_ptr() != local.data_ptr():
                local.copy_(part)

    def published(self, piece: Piece) -> torch.Tensor:
        """The global copy of a piece."""
        return self.destination(piece)

    def prepare_outer(self, piece: Piece) -> None:
        """Give a chunk its part of an outer state that was loaded, before its first outer step."""
        if self.must_be_finite(piece):
            self.outer.prepare(piece, self.destination(piece))

    def install_outer(
        self, chunks: Mapping[Piece, Mapping[str, torch.Tensor]], scalars: Mapping[str, float]
    ) -> None:
        """Replace the outer optimizer's state of some chunks with the published one."""
        for piece, tensors in chunks.items():
            self.outer.install(piece, self.destination(piece), tensors, scalars)

    def forget_outer(self, chunks: Iterable[Piece]) -> None:
        """Drop the outer optimizer's state of some chunks."""
        dropped = list(chunks)
        self.outer.forget(dropped)
        if self.coded is not None:
            for piece in dropped:
                self.coded.chunks.pop(piece, None)

    def table(self) -> dict[str, Any]:
        """Return the manifest's table that says where each tensor is in the fragment's files."""
        return {
            "name": self.name,
            "shards": self.layout.shards,
            "fingerprint": self.fingerprint,
            **tensor_table(self.layout, self._segments.placed),
        }

    def progress(self) -> list[torch.Tensor]:
        """Return what the replica has learned since the last sync: model minus global copy.

        There is one flat tensor per group.

        Groups of buffers have an empty tensor.
        """
        return [
            self.contributed(whole, torch.empty_like(copy)).neg_()
            if self._is_outer(whole)
            else torch.empty(0, device="cpu")
            for whole, copy in zip(self._wholes, self.copy, strict=True)
        ]

    def reapply(self, progress: Sequence[torch.Tensor]) -> None:
        """Add what :meth:`progress` returned to the model again, on top of newly adopted values."""
        for index, values in enumerate(() if self._detached else progress):
            for local, start, stop in self._segments.overlaps(Piece(index, 0, values.numel())):
                local.add_(values[start:stop].to(local.device, local.dtype))
