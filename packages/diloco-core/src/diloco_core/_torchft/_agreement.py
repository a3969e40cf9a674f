"""Finding out whether all replicas hold equal values when they can do nothing but average.

Each compared item becomes eight numbers: the bytes of its digest. The averages of these numbers and of their squares show
whether all replicas agree. If they do, both averages equal what each replica has sent. If they do not, no replica finds its
own numbers in both, because the average of the squares is then larger than the square of the average.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash

from .._arithmetic._layout import Piece
from .._wire._sections import view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._arithmetic._sync_job import SyncJob
    from .._exchange._base import Schema

_VALUES = " with values "
_SYNCED = " in fragment "
_DIGEST_BYTES = 8
# Far above the rounding error of an average of squared bytes, and far below what one replica in a million changes in it.
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
        """The value as errors show it: all of it if it is short, otherwise its beginning and its digest."""
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
    load = "Load the same checkpoint on all replicas before the block is entered, or build the model from the same seed."
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
    """The items that must be equal at all replicas when a fragment is synced: which fragment it is, and its global copy.

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
        "Load the same checkpoint on all replicas, or build the model from the same seed: a manager brings the initial values "
        "only to replicas that it heals at the first step (init_sync=True in torchft)."
        if not committed
        else "Some replicas have taken outer steps that others have not. Start all replicas again from the same checkpoint."
    )
    place = f"fragment {job.name} after {committed} outer steps"
    rates = ", ".join(map(repr, job.rate.values))
    return [
        Compared(
            "fragment that is synced",
            f"{place} (digest of its tensors: {job.fingerprint})",
            advice,
        ),
        Compared(
            "values from which they have trained",
            f"{place}: digest {digest.hexdigest()}",
            advice,
        ),
        Compared(
            "outer learning rate",
            f"{rates or 'none'} for outer step {committed + 1}",
            "outer_lr must return the same number on all replicas for the same outer step: a manager only averages.",
        ),
    ]


def numbers(items: Sequence[Compared]) -> torch.Tensor:
    """The numbers to average: a row for each item with the eight bytes of its digest and their squares, in float64."""
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
