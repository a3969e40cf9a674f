"""Connecting a replica to its run: by arguments, or by what its launcher put into the environment."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Literal

from ._elastic_settings import Elastic
from ._errors import ConfigurationError
from ._exchange import CHUNK_BYTES
from ._exchange_elastic import ElasticExchange
from ._exchange_store import ObjectStoreExchange
from ._rendezvous import check_identity
from ._store import open_store
from ._timing import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping

_lock = threading.Lock()
_open: dict[tuple[str, int], ObjectStoreExchange | ElasticExchange] = {}


def connect(
    uri: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
    join_timeout: float = 1800.0,
    sync_timeout: float = 1800.0,
    beat_interval: float = 10.0,
    lost_after: float = 90.0,
    chunk_bytes: int = CHUNK_BYTES,
    min_replicas: int | None = None,
    grace: float | None = None,
    late: Literal["carry", "drop"] | None = None,
    topology: Literal["auto", "sharded", "gather"] | None = None,
    publish_every: int | None = None,
    retention: int | None = None,
    resume: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> ObjectStoreExchange | ElasticExchange:
    """Connect this replica to the others through an object store.

    What is not given is taken from the environment, as a launcher sets it: ``RENDEZVOUS_URI``, ``REPLICA_RANK``,
    ``WORLD_SIZE``, ``DILOCO_RUN_ID``. A given argument wins. Asking twice in one process for the same URI and rank returns
    the same exchange (settings of the first call), until that one has left its run. Thread-safe.

    The store is opened and tried out here; the replicas meet when the outer loop is entered.

    Membership is strict unless ``min_replicas`` is given: all ranks, from start to end, each living once. With it,
    membership is elastic: replicas may die, come back, join late and leave, and a sync needs ``min_replicas`` of them.
    The options after it are for elastic runs only; see :class:`Elastic`, which also says their defaults.

    Args:
        uri: A prefix that belongs to this run alone: a folder, ``s3://bucket/run``, ``gs://…``, ``az://…``, ``memory://…``.
        rank: This replica, 0 … world_size - 1.
        world_size: Number of replicas.
        run_id: Name of the launch; replicas of different launches refuse each other.
        join_timeout: Seconds to wait for all replicas at the start.
        sync_timeout: Seconds to wait for the others in a sync.
        beat_interval: Seconds between two signs of life.
        lost_after: Seconds without a sign of life after which a replica counts as lost.
        chunk_bytes: Bytes handled at once.
        min_replicas: Makes the run elastic: how many replicas must contribute to a sync.
        grace: Seconds to wait for a late replica before the others go on.
        late: Whether a contribution that came too late goes into the next sync (``carry``) or is forgotten (``drop``).
        topology: Who updates what: ``sharded``, ``gather``, or ``auto`` by the size of the model and of the run.
        publish_every: Every how many syncs of a fragment the gather topology publishes the state.
        retention: How many syncs a replica may lag without having to reload; more of them means more objects.
        resume: Go on with the run that the prefix holds, whichever launch began it.
        environ: Instead of ``os.environ``.

    Raises:
        ConfigurationError: Something is missing or impossible; the message says which argument or variable. Also where an
            elastic run is asked of a store that does not create objects exclusively.
        MissingDependencyError: The driver for the URI's scheme is not installed; names the package.
        StoreUnavailableError: The URI cannot be written and read.
    """
    environ = os.environ if environ is None else environ
    uri = _text(uri, "uri", "RENDEZVOUS_URI", environ)
    rank = _number(rank, "rank", "REPLICA_RANK", environ)
    world_size = _number(world_size, "world_size", "WORLD_SIZE", environ)
    run_id = environ.get("DILOCO_RUN_ID", "") if run_id is None else run_id
    check_identity(rank, world_size)
    timing = Timing(join_timeout, sync_timeout, beat_interval, lost_after)
    options = {"grace": grace, "late": late, "topology": topology, "resume": resume}
    options |= {"publish_every": publish_every, "retention": retention}
    elastic = _elastic(min_replicas, {name: value for name, value in options.items() if value is not None})
    with _lock:
        for key in [key for key, exchange in _open.items() if exchange.ended]:
            del _open[key]
        existing = _open.get((uri, rank))
        if existing is None:
            existing = _new(uri, rank, world_size, run_id, elastic, timing, chunk_bytes)
            _open[uri, rank] = existing
            return existing
        there = _identity(existing)
        # Asked for nothing about membership, the exchange that is open is what is meant.
        if (world_size, run_id, min_replicas if elastic else there[2]) != there:
            raise ConfigurationError(
                f"this process is already connected to {uri} as rank {rank} of {there[0]} in run {there[1]!r} with "
                f"min_replicas={there[2]}, and cannot be rank {rank} of {world_size} in run {run_id!r} with "
                f"min_replicas={min_replicas} too"
            )
        return existing


def _elastic(min_replicas: int | None, options: dict[str, Any]) -> Elastic | None:
    if min_replicas is not None:
        return Elastic(min_replicas, **options)
    for name, value in options.items():
        raise ConfigurationError(
            f"{name}={value!r} is for elastic runs: pass min_replicas= too, or leave it out (strict membership waits for "
            "all replicas and uses the sharded topology)"
        )
    return None


def _new(
    uri: str,
    rank: int,
    world_size: int,
    run_id: str,
    elastic: Elastic | None,
    timing: Timing,
    chunk_bytes: int,
) -> ObjectStoreExchange | ElasticExchange:
    if elastic is None:
        return ObjectStoreExchange(
            open_store(uri), rank, world_size, run_id=run_id, timing=timing, chunk_bytes=chunk_bytes
        )
    elastic.check(world_size, timing.sync_timeout)
    return ElasticExchange(
        open_store(uri), rank, world_size, elastic, run_id=run_id, timing=timing, chunk_bytes=chunk_bytes
    )


def _identity(exchange: ObjectStoreExchange | ElasticExchange) -> tuple[int, str, int | None]:
    quorum = exchange.settings.min_replicas if isinstance(exchange, ElasticExchange) else None
    return exchange.world_size, exchange.run_id, quorum


def _text(given: str | None, argument: str, variable: str, environ: Mapping[str, str]) -> str:
    value = environ.get(variable) if given is None else given
    if value is None or not value.strip():
        raise ConfigurationError(f"pass {argument}= or set {variable}: neither says where the replicas meet")
    return value


def _number(given: int | None, argument: str, variable: str, environ: Mapping[str, str]) -> int:
    if given is not None:
        return given
    text = environ.get(variable)
    if text is None:
        raise ConfigurationError(f"pass {argument}= or set {variable}: neither is there")
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{variable} must be a whole number, not {text!r}") from None
