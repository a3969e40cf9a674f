"""One run in virtual time: N replicas with the real outer loop and store; what each sync costs."""

from __future__ import annotations

import cProfile
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from time import thread_time
from typing import TYPE_CHECKING
from unittest import mock

import torch

from diloco_core import DiLoCo, Elastic, StoreExchange, Timing, Transfer
from diloco_core._arithmetic._layout import CHUNK_BYTES, Layout, Piece
from diloco_core._retry import Retries
from diloco_core._store._drivers._remote import RemoteStore

from .driver import VirtualDriver
from .network import Background, Network
from .s3 import S3, Bucket
from .scaling import Scale, scaled
from .virtual_time import Barrier, VirtualTime

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco_core import Exchange

KINDS = ("fixed", "sharded", "gather")

_chunks = Layout.chunks

_PAUSE = 1.0  # virtual seconds between two syncs
_LIMIT = 1e6  # virtual seconds


@dataclass(frozen=True, slots=True)
class Run:
    """What is run.

    Attributes:
        kind: One of ``KINDS``.
        parameters: How many fp32 parameters are synced.
        replicas: By how many replicas.
        s3: How the store behaves.
        warm: Syncs before those that are measured.
        measured: Syncs that are measured: the figures are means over them.
        tensors: Of how many tensors the model consists.
        grace: Of elastic runs, in seconds.
        publish_every: Of the gather topology.
        joins: Whether one more replica begins when the measured syncs are over (elastic runs only).
        chunks: How many chunks are handled as one. With more than one the simulation is quicker,
            and reads in another order.
        transfer: How the replicas read and write.
        codec: How contributions are sent.
        clip: How contributions are clipped.
    """

    kind: str
    parameters: float
    replicas: int
    s3: S3 = field(default_factory=S3)
    warm: int = 2
    measured: int = 1
    tensors: int = 24
    grace: float = 60.0
    publish_every: int = 4
    joins: bool = False
    chunks: int = 1
    transfer: Transfer = field(default_factory=Transfer)
    codec: str = "plain"
    clip: str | None = None

    @property
    def ranks(self) -> int:
        """How many replicas there may be."""
        return self.replicas + self.joins


@dataclass(slots=True)
class Cost:
    """What something cost a replica.

    Attributes:
        seconds: Virtual seconds.
        requests: Number of requests by kind.
        sent: Bytes that were sent.
        received: Bytes that were received.
        waits: How often it waited for the network: serial round trips.
    """

    seconds: float
    requests: Counter[str]
    sent: int
    received: int
    waits: int


@dataclass(slots=True)
class Outcome:
    """What a run cost.

    Attributes:
        parameters: How many parameters it had, after rounding.
        start: What the start cost every replica: from connecting to the first inner step.
        syncs: What the measured syncs cost every replica.
        joining: What the start cost the replica that came later.
    """

    parameters: int
    start: list[Cost]
    syncs: list[list[Cost]]
    joining: Cost | None = None


def simulate(run: Run, profiles: list[cProfile.Profile] | None = None) -> Outcome:
    """Run it.

    Args:
        run: What is run.
        profiles: Where profiles of the replicas' work are put, if that is wanted.

    Raises:
        StuckError: It came to no end.
        Exception: What the replicas raised.
    """
    torch.set_num_threads(1)
    scale = Scale.fitting(run.parameters, run.ranks)
    time = VirtualTime()
    cohort = _Cohort(run, scale, time)
    chunk_bytes = run.chunks * CHUNK_BYTES // scale.factor
    # Replicas share one process here: how values are cut is worked out once for all of them, unless
    # that is what is measured.
    pieces = lru_cache(maxsize=None)(_pieces)
    chunks = Layout.chunks if profiles is not None else lambda *cut: iter(pieces(*cut))
    with (
        scaled(scale.factor) as sizes,
        mock.patch.object(Layout, "chunks", chunks),
        # Every loop is compared with all others of its process, of which there is one in reality.
        mock.patch("diloco_core._model._place.Place.check"),
        mock.patch("diloco_core._wire._delta.SUMMED_BYTES", chunk_bytes),
    ):
        cohort.part_bytes = sizes["PART_BYTES"]
        for rank in range(run.ranks):
            replica = partial(cohort.replica, rank)
            time.start_at(
                0.0, replica if profiles is None else partial(_profiled, replica, profiles)
            )
        try:
            time.run_all(_LIMIT)
        finally:
            if cohort.errors:
                raise BaseExceptionGroup("replicas failed", cohort.errors[:4])
    if any(not torch.equal(model, cohort.models[0]) for model in cohort.models.values()):
        raise RuntimeError("the replicas ended with different values")
    ranks = range(run.replicas)
    return Outcome(
        scale.parameters,
        [cohort.costs[rank][0] for rank in ranks],
        [
            [cohort.costs[rank][1 + run.warm + number] for rank in ranks]
            for number in range(run.measured)
        ],
        cohort.costs[run.replicas][0] if run.joins else None,
    )


class _Cohort:
    """The replicas of a run."""

    def __init__(self, run: Run, scale: Scale, time: VirtualTime) -> None:
        self._run = run
        self._scale = scale
        self._time = time
        self._bucket = Bucket(run.s3)
        self._barrier = Barrier(time, run.replicas)
        self._all = Barrier(time, run.ranks)
        self.part_bytes = 0
        self.errors: list[BaseException] = []
        self.costs: dict[int, list[Cost]] = {}
        self.models: dict[int, torch.Tensor] = {}
        self._gradients = [torch.full_like(tensor, 0.01) for tensor in self._tensors()]

    def replica(self, rank: int) -> None:
        """What one replica does."""
        try:
            self._train(rank)
        except BaseException as error:  # noqa: BLE001 - raised at the end of the run
            self.errors.append(error)

    def _train(self, rank: int) -> None:
        run, joins = self._run, rank == self._run.replicas
        network = Network(self._time, self._bucket)
        costs = self.costs[rank] = []
        model = torch.nn.ParameterList(self._tensors())
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        if joins:
            self._all.wait()
        end = _counted(network)
        exchange = self._exchange(rank, network)
        options = {"save_inner_every": 0, "codec": run.codec, "clip": run.clip}
        with DiLoCo(model, inner, exchange, sync_every=1, **options):
            costs.append(end())
            for _ in range(0 if joins else run.warm + run.measured):
                self._barrier.wait()
                network.sleep(_PAUSE)
                for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
                    parameter.grad = gradient
                end = _counted(network)
                inner.step()
                costs.append(end())
            if not joins:
                self._all.wait()
            self._all.wait()
        self.models[rank] = torch.cat([parameter.detach() for parameter in model.parameters()])

    def _exchange(self, rank: int, network: Network) -> Exchange:
        run = self._run
        retries = Retries(clock=network.clock, sleep=network.sleep)
        driver = VirtualDriver(network, self._scale.factor, self.part_bytes)
        background = partial(Background, network)
        given, factor = run.transfer, self._scale.factor
        transfer = Transfer(
            given.connections, given.block_bytes // factor, given.budget_bytes // factor
        )
        store = RemoteStore(
            "s3://bucket/run", driver, retries, transfer=transfer, background=background
        )
        timing = Timing(
            join_timeout=_LIMIT,
            sync_timeout=_LIMIT,
            clock=network.clock,
            sleep=network.sleep,
            repeat=network.repeat,
        )
        chunk_bytes = run.chunks * CHUNK_BYTES // self._scale.factor
        settings = None
        if run.kind != "fixed":
            settings = Elastic(
                run.replicas,
                grace=run.grace,
                topology=run.kind,
                publish_every=run.publish_every if run.kind == "gather" else None,
            )
        return StoreExchange(
            store, rank, run.ranks, settings, timing=timing, chunk_bytes=chunk_bytes
        )

    def _tensors(self) -> list[torch.Tensor]:
        bounds = [
            self._scale.elements * index // self._run.tensors
            for index in range(self._run.tensors + 1)
        ]
        return [torch.ones(stop - start) for start, stop in pairwise(bounds)]


def _counted(network: Network) -> Callable[[], Cost]:
    """What is sent from now on; returns what tells of it."""
    start, requests = network.clock(), network.requests.copy()
    sent, received, waits = network.sent, network.received, network.waits

    def end() -> Cost:
        return Cost(
            network.clock() - start,
            network.requests - requests,
            network.sent - sent,
            network.received - received,
            network.waits - waits,
        )

    return end


def _pieces(layout: Layout, shard: int, chunk_bytes: int) -> tuple[Piece, ...]:
    return tuple(_chunks(layout, shard, chunk_bytes))


def _profiled(act: Callable[[], None], profiles: list[cProfile.Profile]) -> None:
    # The thread's own time: what it waits for its turn is no work.
    profile = cProfile.Profile(thread_time)
    profiles.append(profile)
    profile.runcall(act)
