"""A fragment whose sync goes on while its replica trains.

It sends what the model held, and takes the result later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .._arithmetic._layout import Piece
from .._model._segments import ready
from ._device_copies import ACCELERATOR, VALUES, Accelerator, DeviceCopies
from ._fragment import Fragment

# What was brought to a device, by the pinned buffer, the group, and where it starts in the group.
_Near = Mapping[tuple[str, int, int], torch.Tensor]

_OLD = "old"  # the pinned buffer for the global copy before the sync


@dataclass(slots=True)
class _Snapshot:
    """Hold what was taken from the model to be sent.

    The thread of the exchange writes to it. So if the training gives up a sync whose thread goes
    on, it drops the snapshot, and the thread changes nothing that is used later.

    Attributes:
        stop: The first inner step after those that the contribution covers; None if there is none.
        taken: Returns the model's values, as long as the contribution is not computed.
        sent: The contribution.
        unchanged: The groups of buffers that were as in the global copy.
        packed: What became of the contribution, once the result is in pinned memory; or empty.
    """

    stop: int | None
    taken: Callable[[], list[torch.Tensor]] | None = None
    sent: list[torch.Tensor] = field(default_factory=list)
    unchanged: Collection[int] = ()
    packed: str = ""


class DelayedFragment(Fragment):
    """A :class:`Fragment` that is sent at one inner step and adopted at a later one.

    Not thread-safe.

    While it is detached (from :meth:`detach` to :meth:`arrive` or :meth:`attach`), the exchange
    uses only the global copy, the outer state, the residual and, of the fragment that is sent, a
    snapshot (:meth:`depart`). The training loop touches none of them. So the exchange may run in
    another thread, and the model is free. That thread calls :meth:`collect` before the sync and
    :meth:`pack` after it.

    Where the model is on an accelerator, the training does not wait for the device: the snapshot is
    a copy on the device, and gets to the CPU, and the result to the device, by
    :class:`.DeviceCopies`.
    """

    _snapshot: _Snapshot | None = None
    _before: list[torch.Tensor] | None = None
    _copies: DeviceCopies | None = None
    _accelerator: Accelerator = ACCELERATOR

    def detach(self) -> None:
        """Keep the exchange away from the model from now on."""
        self._detached = True

    def attach(self) -> None:
        """Let the exchange use the model again, and forget what was sent."""
        self._detached = False
        self._snapshot = self._before = None

    def depart(self) -> None:
        """Take the snapshot that is sent, and detach. The model may change from now on."""
        self.attach()
        self.begin()
        snapshot = _Snapshot(None if (steps := self.contribution.steps) is None else steps[1])
        tensors = [ready(segment) for segment in self._segments]
        if any(self._accelerator.has_streams(values.device) for values in tensors):
            if self._copies is None or not self._copies.fits(tensors):
                self._copies = DeviceCopies(tensors, self._accelerator)
            snapshot.taken = self._copies.take(tensors)
        else:
            self._copies = None
            self._compute(snapshot, tensors)
        self._segments.forget()
        self._snapshot = snapshot
        self.detach()

    def collect(self) -> None:
        """Wait for the snapshot if a device has yet to deliver it, and compute what is sent.

        To be called once after :meth:`depart`, by the thread that carries out the sync, before the
        sync begins.

        Raises:
            NonFiniteDeltaError: With error feedback: the contribution, or what it decodes to, holds
                NaN or infinity.
        """
        snapshot = self._snapshot
        if snapshot is not None and snapshot.taken is not None:
            self._compute(snapshot, snapshot.taken())
            snapshot.taken = None

    def _compute(self, snapshot: _Snapshot, tensors: Sequence[torch.Tensor]) -> None:
        """Compute the contribution of a replica whose tensors hold these values.

        There is one flat tensor per segment.
        """
        values, sent, unchanged = iter(tensors), [], []
        for index, whole in enumerate(self._wholes):
            parts = [(next(values), span.start, span.stop) for span in self._segments.placed[index]]
            parts = [part for part in parts if part[0].numel()]
            if not self._is_outer(whole) and self._is_unchanged(index, parts):
                unchanged.append(index)
            out = torch.empty_like(self.copy[index])
            contribution = self._contribution(whole, parts, out)
            if contribution is not out:  # a view of the model
                out.copy_(contribution)
            sent.append(out)
        if self.residual is not None and snapshot.stop is not None:
            self.residual.offer(sent, snapshot.stop)
        snapshot.sent, snapshot.unchanged = sent, unchanged

    def pack(self, fate: str) -> None:
        """Write what the model is to be given into pinned memory, if it is on an accelerator.

        To be called after the sync, by the thread that has carried it out; otherwise :meth:`arrive`
        does it.

        Args:
            fate: What became of the contribution; see :attr:`.SyncReport.contribution`.
        """
        snapshot = self._snapshot
        if snapshot is not None and self._copies is not None and snapshot.packed != fate:
            for which, values in self._to_be_brought(fate).items():
                self._copies.pack(which, values)
            snapshot.packed = fate

    def _to_be_brought(self, fate: str) -> dict[str, list[torch.Tensor | None]]:
        """Return what the model needs of the new global copy and of the old one.

        Each is one tensor per segment; None where the model needs nothing.
        """
        before = self._before if fate == "carried" else None
        alpha = self._kept(fate)
        needed: dict[str, list[torch.Tensor | None]] = {VALUES: [], _OLD: []}
        for index, whole in enumerate(self._wholes):
            mixed = self._is_outer(whole) and bool(alpha or before)
            for segment in self._segments.placed[index]:
                place = slice(segment.start, segment.stop)
                new = None if mixed and alpha == 1 else self.copy[index][place]
                old = before[index][place] if mixed and before and alpha < 1 else None
                needed[VALUES].append(new)
                needed[_OLD].append(old)
        return {w: v for w, v in needed.items() if any(tensor is not None for tensor in v)}

    def _kept(self, fate: str) -> float:
        """Return how much of its own values the replica keeps."""
        return self.alpha if fate in {"counted", "carried"} else 0.0

    def arrive(self, fate: str) -> None:
        """Give the model the result, mixed with its own values, and delete the gradients.

        The gradients belong to the old values.

        A contribution that was counted is in the new global copy G; of the own values L, ``alpha``
        is kept: the model becomes ``lerp(G, L, alpha)``. One that was carried is not in it: with
        the old global copy G', the model becomes ``lerp(G, G', alpha) + (L - G')``, so that its own
        progress stays whole. What was dropped keeps nothing. Only parameters are mixed: buffers
        take what was synced.

        Args:
            fate: What became of the contribution; see :attr:`.SyncReport.contribution`.
        """
        before = self._before if fate == "carried" else None
        alpha = self._kept(fate)
        self.pack(fate)
        with self._brought(fate) as near, torch.no_grad():
            self.attach()
            self.begin()
            for index, whole in enumerate(self._wholes):
                if not self._is_outer(whole) or not (alpha or before):
                    self._take_over(whole, near)
                elif alpha < 1:
                    self._mix(whole, alpha, before[index] if before else None, near)
            self._adopted = True
            self.finish()

    @contextmanager
    def _brought(self, fate: str) -> Iterator[_Near]:
        """Return what was packed, on its devices; nothing for a model on the CPU."""
        if self._snapshot is None or self._copies is None:
            yield {}
            return
        placed = enumerate(self._segments.placed)
        places = [(index, segment.start) for index, segments in placed for segment in segments]
        with self._copies.unpacked(*self._to_be_brought(fate)) as parts:
            yield {
                (which, *places[number]): values
                for (which, number), values in parts.items()
                if values.numel()
            }

    def _take_over(self, whole: Piece, near: _Near) -> None:
        if not near:
            self.adopt(whole, self.destination(whole))
            return
        for local, start, stop in self._segments.overlaps(whole):
            new = self.copy[whole.group][start:stop]
            local.copy_(_at(near, (VALUES, whole.group, start), new, local))

    def _mix(self, whole: Piece, alpha: float, before: torch.Tensor | None, near: _Near) -> None:
        for local, start, stop in self._segments.overlaps(whole):
            new = self.copy[whole.group][start:stop]
            new = _at(near, (VALUES, whole.group, start), new, local)
            if before is None:
                local.copy_(torch.lerp(new, local, alpha))
                continue
            # As with contributions, the rounding of a global copy to the model's dtype is not
            # progress of the replica.
            old = _at(near, (_OLD, whole.group, start), before[start:stop], local)
            wide = before.dtype
            progress = local.to(wide).sub_(old.to(wide)).to(local.dtype)
            local.copy_(torch.lerp(new, old, alpha).add_(progress))

    def contributed(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """Return what was computed from the snapshot; without one, what the model holds now."""
        if self._snapshot is None:
            return super().contributed(piece, out)
        assert self._snapshot.taken is None, "collect() comes first"
        return self._snapshot.sent[piece.group][piece.start : piece.stop]

    def unchanged(self) -> Collection[int]:
        """The groups of buffers that were as in the global copy when the snapshot was taken."""
        if self._snapshot is None:
            return super().unchanged()
        assert self._snapshot.taken is None, "collect() comes first"
        return self._snapshot.unchanged

    def progress(self) -> list[torch.Tensor]:
        """Return what the replica has learned since the last sync.

        A detached fragment returns nothing, and keeps its global copy for :meth:`arrive`.
        """
        if not self._detached:
            return super().progress()
        self._before = [values.clone() for values in self.copy]
        return []


def _at(
    near: _Near, place: tuple[str, int, int], values: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """Return values with the device and the dtype of a tensor of the model.

    They are those that were brought there, or else ``values``.
    """
    brought = near.get(place)
    if brought is None or brought.device != local.device or brought.dtype is not local.dtype:
        return values.to(local.device, local.dtype)
    return brought
