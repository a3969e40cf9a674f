"""Connecting a replica to its run: by arguments, or by what its launcher put into the environment."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from ._errors import ConfigurationError
from ._exchange import CHUNK_BYTES
from ._exchange_store import ObjectStoreExchange
from ._rendezvous import check_identity
from ._store import open_store
from ._timing import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping

_lock = threading.Lock()
_open: dict[tuple[str, int], ObjectStoreExchange] = {}


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
    environ: Mapping[str, str] | None = None,
) -> ObjectStoreExchange:
    """Connect this replica to the others through an object store.

    What is not given is taken from the environment, as a launcher sets it: ``RENDEZVOUS_URI``, ``REPLICA_RANK``,
    ``WORLD_SIZE``, ``DILOCO_RUN_ID``. A given argument wins. Asking twice in one process for the same URI and rank returns
    the same exchange (settings of the first call), until that one has left its run. Thread-safe.

    The store is opened and tried out here; the replicas meet when the outer loop is entered.

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
        environ: Instead of ``os.environ``.

    Raises:
        ConfigurationError: Something is missing or impossible; the message says which argument or variable.
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
    with _lock:
        for key in [key for key, exchange in _open.items() if exchange.ended]:
            del _open[key]
        existing = _open.get((uri, rank))
        if existing is None:
            existing = ObjectStoreExchange(
                open_store(uri), rank, world_size, run_id=run_id, timing=timing, chunk_bytes=chunk_bytes
            )
            _open[uri, rank] = existing
        elif (existing.world_size, existing.run_id) != (world_size, run_id):
            raise ConfigurationError(
                f"this process is already connected to {uri} as rank {rank} of {existing.world_size} in run "
                f"{existing.run_id!r}, and cannot be rank {rank} of {world_size} in run {run_id!r} too"
            )
        return existing


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
