"""The plain mean of tensors over all replicas: an exchange whose update is the identity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ._arithmetic._layout import Piece, Rule
from ._connect import connect
from ._connect_arguments import given
from ._errors import ConfigurationError
from ._exchange._base import Exchange, Schema
from ._exchange._report import SyncReport
from ._model._partition import NamedTensor
from ._outer._fragment import Fragment
from ._outer._optimizer import OuterOptimizer
from ._terms._support import check_process_group

_TOLD = (
    "If this process is to take means for a replica nevertheless, pass rank= and world_size= to "
    "ObjectStoreAllReduce"
)


class Mean(Fragment):
    """Tensors whose mean over the replicas is to replace them: a fragment without an outer step.

    Args:
        tensors: Floating-point tensors, on any device.
        shards: Into how many shards they are cut.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], shards: int) -> None:
        for number, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ConfigurationError(
                    f"a mean needs floating-point tensors; number {number} is {what}"
                )
        if not tensors:
            raise ConfigurationError("a mean needs at least one tensor")
        named = [
            NamedTensor(str(number), tensor, Rule.MEAN) for number, tensor in enumerate(tensors)
        ]
        super().__init__("mean", named, OuterOptimizer(()), shards)
        self.kind = "mean"
        for number, segments in enumerate(self._segments.placed):
            tensor = segments[0].named.tensor.detach()
            group = self.layout.groups[number]
            if (
                len(segments) == 1
                and tensor.is_contiguous()
                and tensor.dtype is group.dtype
                and tensor.device.type == "cpu"
            ):
                # One plain tensor needs no second copy: results are read straight into it.
                self.copy[number] = tensor.view(-1)

    def unchanged(self) -> list[int]:
        """None: there is no global copy."""
        return []

    def must_be_finite(self, piece: Piece) -> bool:  # noqa: ARG002 - the protocol's signature
        """All of it."""
        return True


class ObjectStoreAllReduce:
    """Mean of tensors over all replicas through an object store; all replicas or none.

    Every replica calls :meth:`mean` equally often, with tensors of the same shapes and dtypes. Sums
    are taken in rank order in ``promote_types(dtype, float32)``, so every replica gets the same
    bytes, and repeated runs do too. Bytes per call and replica stay about twice the tensors' for
    any number of replicas. Not thread-safe.

    A process that is in a ``torch.distributed`` group with others is refused over a store, unless
    ``rank`` and ``world_size`` are passed here: they say which replica this process is, or for
    which replica it alone takes the mean.

    Args:
        uri: The prefix where the replicas meet, or an exchange to use. From the environment if left
            out; see :func:`connect`, which also says what ``options`` there are.
        rank: This replica.
        world_size: Number of replicas.
        **options: Passed on to :func:`connect`.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Exchange | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        if uri is None or isinstance(uri, (str, os.PathLike)):
            self._told = rank is not None and world_size is not None
            self.exchange: Exchange = connect(uri, rank=rank, world_size=world_size, **options)
        elif callable(getattr(uri, "begin", None)):
            names = given(rank=rank, world_size=world_size, **options)
            if names:
                raise ConfigurationError(
                    f"{', '.join(names)}: an exchange has its own; leave them out, or pass a URI"
                )
            self._told, self.exchange = False, uri
        else:
            raise ConfigurationError(
                f"uri must be where the replicas meet, or an exchange, not {uri!r}"
            )

    def mean(self, tensors: Sequence[torch.Tensor]) -> SyncReport:
        """Replace the tensors by their mean over all replicas, in place.

        The first call also meets the other replicas.

        Raises:
            ConfigurationError: A tensor is not floating-point; or this process is in a group, and
                was not told its rank.
            NonFiniteDeltaError: A tensor holds NaN or infinity; nothing was sent.
            MismatchError: Another replica passed another number of tensors, other shapes or dtypes.
            SyncTimeoutError: Others did not come in time; it names them.
            ReplicaLostError: Another replica died or failed.
        """
        if not self._told:
            check_process_group(self.exchange, _TOLD)
        job = Mean(tensors, self.exchange.world_size)
        self.exchange.join(Schema({}, {"operation": "mean"}))
        job.begin()
        report = self.exchange.begin(job).finish()
        job.finish()
        return report

    def close(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        self.exchange.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.exchange.abort(error)
        self.close()
