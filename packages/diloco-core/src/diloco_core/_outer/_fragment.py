"""One fragment of a model: its global copy, and its side of a sync."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from .._arithmetic._layout import Layout, Piece, Rule
from .._codecs._plain import PLAIN
from .._errors import NonFiniteUpdateError
from .._model._segments import arrange, tensor_table
from .._wire._sections import fingerprint, view

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .._codecs._codec import Codec
    from .._model._partition import NamedTensor
    from .._model._segments import Segment
    from ._optimizer import OuterOptimizer


# What a number must stay below to be finite in a narrower dtype after rounding to nearest: half a step above the largest.
_ROUNDS_TO_INFINITY = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 - 2.0**119}


class Fragment:
    """A fragment as a :class:`._resumable.ResumableJob`: global copy on the CPU, outer state of the own shards. Not thread-safe.

    The contribution is the pseudo-gradient, what the model held after the last sync minus what it holds now. For a model in
    bf16 or fp16 "what it held" is the rounded global copy: the rounding is no progress of the replica, and counting it would
    undo every outer step that is too small for the model's dtype.

    Args:
        name: Its name in reports and in the store.
        tensors: What it consists of.
        outer: Its outer optimizer; None where nothing of it takes an outer step.
        shards: Into how many shards it is cut.
        codec: How its contributions are sent.

    Attributes:
        elastic: Whether it belongs to an elastic run; errors say what can be done there.
        steps: Which of this replica's inner steps the contribution covers, or None where it has none to make.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[NamedTensor],
        outer: OuterOptimizer | None,
        shards: int,
        codec: Codec = PLAIN,
    ) -> None:
        self.name = name
        self.tensors = tuple(tensors)
        self.outer = outer
        self.kind = "outer"
        self.codec = codec
        self.elastic = False
        self.supersedes: Sequence[int] = ()
        self.steps: tuple[int, int] | None = None
        self._adopted = False
        groups, self._segments = arrange(tensors)
        self.layout = Layout(groups, shards)
        self._starts = [[segment.start for segment in segments] for segments in self._segments]
        self._square_bounds = [
            _square_bound(g.dtype, s) for g, s in zip(groups, self._segments, strict=True)
        ]
        self.copy = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in groups]
        self.fingerprint = fingerprint("fragment", name, shards, self.schema())

    def schema(self) -> dict[str, str]:
        """Name and description of every tensor."""
        sent = "" if self.codec.plain else f", sent as {self.codec.name}"
        return {
            named.name: f"{named.describe()} in fragment {self.name}{sent}"
            for named in self.tensors
        }

    def digests(self) -> dict[str, str]:
        """Name and checksum of every tensor's global copy."""
        checksums = {}
        for copy, segments in zip(self.copy, self._segments, strict=True):
            for segment in segments:
                values = copy[segment.start : segment.stop]
                checksums[segment.named.name] = xxhash.xxh3_64_hexdigest(view(values))
        return checksums

    def take_snapshot(self) -> None:
        """Global copy := what the model holds."""
        self.begin()
        for copy, segments in zip(self.copy, self._segments, strict=True):
            for segment in segments:
                copy[segment.start : segment.stop].copy_(_ready(segment))
        self.finish()

    def start_over(self) -> None:
        """Model := global copy; what was learned since the last sync is forgotten."""
        self.begin()
        for index, group in enumerate(self.layout.groups):
            whole = Piece(index, 0, group.numel)
            self.adopt(whole, self.destination(whole))
        self.finish()

    def settle(self) -> list[str]:
        """Model := global copy, where something has changed it since the last sync; returns the parameters among that."""
        changed = []
        self.begin()
        for copy, segments in zip(self.copy, self._segments, strict=True):
            for segment in segments:
                local, wanted = _ready(segment), copy[segment.start : segment.stop]
                # Bit by bit, since buffers may hold NaN.
                if not torch.equal(
                    local.cpu().view(torch.uint8), wanted.to(local.dtype).view(torch.uint8)
                ):
                    local.copy_(wanted)
                    if segment.named.rule is Rule.OUTER:
                        changed.append(segment.named.name)
        self.finish()
        return changed

    def follow(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Sync these tensors under their names from now on: modules put new ones in the places of their buffers."""
        for segment in self._all_segments():
            tensor = buffers.get(segment.named.name, segment.named.tensor)
            if tensor is not segment.named.tensor:
                segment.named = replace(segment.named, tensor=tensor)

    def followed(self) -> list[NamedTensor]:
        """What it consists of, with the tensors that are in the model now."""
        return [segment.named for segment in self._all_segments()]

    def begin(self) -> None:
        """Look at the model's tensors as flat ones; a tensor that is not contiguous is copied until :meth:`finish`."""
        self._adopted = False
        for segment in self._all_segments():
            segment.values = segment.named.tensor.detach().reshape(-1)

    def finish(self) -> None:
        """Write copied tensors back. Where new values were adopted, gradients go: they belong to values that are gone."""
        with torch.no_grad():
            for segment in self._all_segments():
                tensor, values = segment.named.tensor, segment.values
                if values is None:
                    continue
                if values.data_ptr() != tensor.data_ptr() and tensor.numel():
                    tensor.copy_(values.view(tensor.shape))
                if segment.named.rule is Rule.OUTER and self._adopted:
                    tensor.grad = None
                segment.values = None

    def contribution(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """The pseudo-gradient of a piece; of buffers, their values."""
        outer = self.layout.groups[piece.group].rule is Rule.OUTER
        for local, start, stop in self._overlaps(piece):
            base = self.copy[piece.group][start:stop]
            part = out[start - piece.start : stop - piece.start]
            if not outer:
                if local.data_ptr() == base.data_ptr() and local.numel() == piece.numel:
                    return local
                part.copy_(local)
                if local.dtype is not base.dtype and not self.must_be_finite(piece):
                    # As with parameters, the rounding of the last mean to the model's dtype is no change.
                    torch.where(base.to(local.dtype).to(base.dtype) == part, base, part, out=part)
                continue
            if local.dtype is not base.dtype:
                base = base.to(local.dtype).to(base.dtype)
            torch.sub(base, local.to("cpu", base.dtype), out=part)
        return out

    def unchanged(self) -> list[int]:
        """Groups of buffers that this replica has left as they are in the global copy."""
        return [
            index
            for index, group in enumerate(self.layout.groups)
            if group.rule is not Rule.OUTER and self._is_unchanged(Piece(index, 0, group.numel))
        ]

    def _is_unchanged(self, piece: Piece) -> bool:
        copy = self.copy[piece.group]
        return all(
            view(local.cpu()) == view(copy[start:stop].to(local.dtype))
            for local, start, stop in self._overlaps(piece)
        )

    def locate(self, piece: Piece, index: int) -> str:
        """Name of the tensor that holds element ``index`` of the piece."""
        number = bisect_right(self._starts[piece.group], piece.start + index) - 1
        return self._segments[piece.group][number].named.name

    def update(self, piece: Piece, reduced: torch.Tensor) -> torch.Tensor:
        """Take the outer step on the global copy; buffers just take the reduced values."""
        values = self.destination(piece)
        if self.outer is not None and self.layout.groups[piece.group].rule is Rule.OUTER:
            self.outer.step(piece, values, reduced)
        else:
            values.copy_(reduced)
        return values

    def must_be_finite(self, piece: Piece) -> bool:
        """Whether the piece takes an outer step."""
        return self.layout.groups[piece.group].rule is Rule.OUTER

    def check_update(self, piece: Piece, values: torch.Tensor, sync: int) -> None:
        """Refuse an outer step that leaves what the model's dtype, or the outer optimizer's state, can hold.

        Raises:
            NonFiniteUpdateError: It names the tensor.
        """
        if not self.must_be_finite(piece):
            return
        # The sum of squares bounds every value, and shows NaN and infinity; it costs less than a tenth of the outer step.
        if not torch.dot(values, values).item() < self._square_bounds[piece.group]:
            for segment, start, stop in self._parts(piece):
                dtype = segment.named.tensor.dtype
                if not values[start - piece.start : stop - piece.start].to(dtype).isfinite().all():
                    raise NonFiniteUpdateError(
                        segment.named.name, dtype, sync, self._outer_lr(), elastic=self.elastic
                    )
        if self.outer is not None and (index := self.outer.not_finite(piece)) is not None:
            raise NonFiniteUpdateError(
                self.locate(piece, index),
                values.dtype,
                sync,
                self._outer_lr(),
                elastic=self.elastic,
            )

    def _outer_lr(self) -> float | None:
        return None if self.outer is None else self.outer.lr

    def destination(self, piece: Piece) -> torch.Tensor:
        """The global copy of a piece."""
        return self.copy[piece.group][piece.start : piece.stop]

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Model := ``values``, rounded to the model's dtype."""
        self._adopted = True
        for local, start, stop in self._overlaps(piece):
            part = values[start - piece.start : stop - piece.start]
            if part.data_ptr() != local.data_ptr():
                local.copy_(part)

    def published(self, piece: Piece) -> torch.Tensor:
        """The global copy of a piece."""
        return self.destination(piece)

    def outer_scalars(self, piece: Piece) -> Mapping[str, float]:
        """Scalars of the outer optimizer for a chunk of an own shard."""
        return {} if self.outer is None else self.outer.scalars(piece)

    def outer_state(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """Tensors of the outer optimizer for a chunk of an own shard."""
        return {} if self.outer is None else self.outer.tensors(piece)

    def install_outer(
        self, chunks: Mapping[Piece, Mapping[str, torch.Tensor]], scalars: Mapping[str, float]
    ) -> None:
        """Replace the outer optimizer's state of some chunks by what was published."""
        if self.outer is not None:
            for piece, tensors in chunks.items():
                self.outer.install(piece, self.destination(piece), tensors, scalars)

    def forget_outer(self, chunks: Iterable[Piece]) -> None:
        """Let go of the outer optimizer's state of some chunks."""
        if self.outer is not None:
            self.outer.forget(chunks)

    def table(self) -> dict[str, Any]:
        """Where in the files of the fragment every tensor lies."""
        own = {"name": self.name, "shards": self.layout.shards, "fingerprint": self.fingerprint}
        return {**own, **tensor_table(self.layout, self._segments)}

    def progress(self) -> list[torch.Tensor]:
        """What the replica has learned since the last sync: model minus global copy, of the parameters."""
        differences = []
        for index, group in enumerate(self.layout.groups):
            whole = Piece(index, 0, group.numel)
            if group.rule is Rule.OUTER:
                differences.append(
                    self.contribution(
                        whole, torch.empty(group.numel, dtype=group.dtype, device="cpu")
                    ).neg_()
                )
            else:
                differences.append(torch.empty(0, device="cpu"))
        return differences

    def reapply(self, progress: Sequence[torch.Tensor]) -> None:
        """Add what :meth:`progress` returned to the model again, on top of values that were adopted since."""
        for index, values in enumerate(progress):
            for local, start, stop in self._overlaps(Piece(index, 0, values.numel())):
                local.add_(values[start:stop].to(local.device, local.dtype))

    def _overlaps(self, piece: Piece) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The model's values in a piece: flat tensors, and where in the group they start and stop."""
        for segment, start, stop in self._parts(piece):
            yield _ready(segment)[start - segment.start : stop - segment.start], start, stop

    def _parts(self, piece: Piece) -> Iterator[tuple[Segment, int, int]]:
        """The tensors that have elements in a piece, and where in the group these start and stop."""
        segments = self._segments[piece.group]
        number = bisect_right(self._starts[piece.group], piece.start) - 1
        while number < len(segments) and segments[number].start < piece.stop:
            segment = segments[number]
            start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
            if start < stop:
                yield segment, start, stop
            number += 1

    def _all_segments(self) -> Iterator[Segment]:
        return chain.from_iterable(self._segments)


def _square_bound(dtype: torch.dtype, segments: Sequence[Segment]) -> float:
    """What the sum of a chunk's squares must be less than, so that all of its values are finite in the model's dtypes."""
    narrowest = min(
        (_ROUNDS_TO_INFINITY.get(s.named.tensor.dtype, math.inf) for s in segments),
        default=math.inf,
    )
    return min(narrowest**2, torch.finfo(dtype).max) if dtype.is_floating_point else math.inf


def _ready(segment: Segment) -> torch.Tensor:
    if segment.values is None:
        raise RuntimeError("begin() comes before a fragment's values are used")
    return segment.values
