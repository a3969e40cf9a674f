"""Connecting a replica to its run, by arguments or by its launcher's environment variables."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ._arithmetic._layout import CHUNK_BYTES
from ._checks import check_identity, whole, yes_or_no
from ._connect_arguments import (
    check_told,
    elastic_of,
    given,
    number_of,
    processes_of,
    settings_of,
    timing_of,
    uri_of,
    world_size_of,
)
from ._errors import ConfigurationError
from ._exchange._replica import ReplicaExchange
from ._exchange._telemetry import Telemetry
from ._redact import redact_uri
from ._run._exchange import StoreExchange
from ._run._settings import Elastic
from ._store._drivers._folder import FolderStore, whole_path
from ._store._drivers._remote import RemoteStore
from ._store._open import open_store
from ._store._transfer import Transfer
from ._timing import Timing, limits_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Exchange: TypeAlias = StoreExchange | ReplicaExchange

_MOST_CHUNK_BYTES = 2**30
_LONGEST_RUN_ID = 256  # characters, of up to 12 bytes; beginning.json has at most 4096


class _Connected(NamedTuple):
    """An open exchange and the settings that it was opened with."""

    exchange: Exchange
    settings: Mapping[str, object]


_Key: TypeAlias = tuple[int, str, int]

_lock = threading.Lock()
# The key includes the process: a forked process has to connect by itself.
_open: dict[_Key, _Connected] = {}


def _unlock() -> None:
    """Replace the lock in a forked process.

    A thread of the parent may have held it, and does not exist here to release it.
    """
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def connect(
    uri: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
    join_timeout: float | None = None,
    sync_timeout: float | None = None,
    beat_interval: float | None = None,
    lost_after: float | None = None,
    return_within: float | None = None,
    chunk_bytes: int | None = None,
    transfer: Transfer | None = None,
    min_replicas: int | None = None,
    grace: float | None = None,
    late: Literal["carry", "drop"] | None = None,
    topology: Literal["auto", "sharded", "gather"] | None = None,
    publish_every: int | None = None,
    retention: int | None = None,
    resume: bool | Literal["newest-whole"] | None = None,
    elastic: Elastic | None = None,
    timing: Timing | None = None,
    process_group: ProcessGroup | None = None,
    telemetry: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> Exchange:
    """Connect this replica to the others through an object store.

    Arguments that are left out are taken from the environment, where a launcher sets them:
    ``RENDEZVOUS_URI``, ``REPLICA_RANK``, ``REPLICA_WORLD_SIZE``, ``DILOCO_COHORT``. An argument
    takes precedence over its variable. Several processes that torchrun has
    started (``LOCAL_WORLD_SIZE``) are one replica, unless ``rank`` and ``world_size`` are passed:
    each of them is a replica then.

    A second call in the same process for the same URI and rank returns the same exchange, until
    that exchange has left its run; settings that are given in the second call must equal those of
    the first. Thread-safe. A forked process has to connect by itself: it cannot use the connection
    of its parent.

    This function opens the store and tries it out. An endpoint that does not answer is reported
    within two minutes. The replicas meet later, when the outer loop is entered. From then on,
    replicas wait up to ``sync_timeout`` seconds for a store that is unavailable, and no replica
    counts as late or lost during that time.

    Membership is fixed unless ``min_replicas`` is given: all ranks take part in every sync. A rank
    that is started again takes the place of its former process, and the others wait for it for
    ``return_within`` seconds. Where the store ignores conditional writes this is not possible: the
    run ends without the rank. When a run has ended, all ranks together can continue it with
    ``resume=True``, from its newest state.

    With ``min_replicas``, membership is elastic: replicas may die, come back, join late and leave,
    and a sync needs ``min_replicas`` of them. The options after it, except ``resume``, are for
    elastic runs only; :class:`Elastic` describes them and their defaults.

    These options may be given together, as ``elastic=Elastic(2, grace=30)``, and the limits in
    seconds as ``timing=Timing(sync_timeout=600)``. The single arguments are for launchers, which
    hold them as plain numbers.

    Args:
        uri: A prefix that belongs to this run alone: a folder, ``s3://bucket/run``, ``gs://…``,
            ``az://…``, ``memory://…``. Elastic runs have not been tested on ``gs://`` and
            ``az://``. Credentials do not belong in it: those for ``s3://``, ``gs://`` and ``az://``
            come from the variables and files that their drivers read. Passwords in URIs of other
            schemes are never shown in messages.
        rank: The number of this replica, from 0 to world_size - 1.
        world_size: Number of replicas.
        run_id: Name of the run, of at most 256 characters; replicas of different runs refuse each
            other. ``DILOCO_COHORT`` if left out, or ``DILOCO_RUN_ID`` if that is not set.
        join_timeout: Seconds to wait for all replicas at the start; 1800 if left out.
        sync_timeout: Seconds to wait for the others in a sync, and for a store that is unavailable;
            1800 if left out.
        beat_interval: Seconds between two signs of life; 10 if left out.
        lost_after: Seconds without a sign of life after which a replica counts as lost; 90 if left
            out. It is refused in elastic runs, where ``grace`` takes its place.
        return_within: Seconds that the others then wait for it to be started again, 0 for not at
            all, and no longer than ``sync_timeout`` in all. 300 if left out; 0 where the launch
            says that it starts nothing again (``DILOCO_RESTARTS=0``, which the runner sets), also
            with a ``timing`` that leaves it at 300. Refused in elastic runs, likewise. Means
            (:class:`ObjectStoreAllReduce`) have no state with which a rank could come back: there
            it is 0, and another number is refused.
        chunk_bytes: Bytes handled at once; 1 MiB if left out. May differ between replicas.
        transfer: Connections, block size and memory for a store behind a network, such as
            ``Transfer(connections=32)``. May differ between replicas; refused for folders.
        min_replicas: Makes the run elastic: how many replicas must contribute to a sync.
        grace: Seconds to wait for a late replica before the others go on.
        late: Whether a contribution that came too late goes into the next sync (``carry``) or is
            forgotten (``drop``).
        topology: Which replica updates which parameters: ``sharded``, ``gather``, or ``auto``,
            which chooses by the size of the model and the number of replicas.
        publish_every: In the gather topology, the number of syncs of a fragment from one published
            state to the next. If ``auto`` chooses ``sharded``, it is refused at the start.
        retention: How many syncs a replica may lag without having to reload. A larger number keeps
            more objects in the store.
        resume: Continue the run that the prefix holds, even if another launch began it. All ranks
            of a fixed run continue it together, with the same model and settings (``sync_every``
            may change on all of them). ``"newest-whole"`` also permits the run to return to an
            older state if a newer one is damaged and cannot be restored.
        elastic: Settings that make the run elastic; replaces ``min_replicas`` and what follows it.
        timing: The limits in seconds; replaces ``join_timeout``, ``sync_timeout``,
            ``beat_interval``, ``lost_after`` and ``return_within``.
        process_group: The processes that are this replica together, where they are a part of
            torch's default group; in other cases they are all of that.
        telemetry: Whether this replica tells in the store what it does and what its syncs have
            done, for those who watch the run; True if left out. Nothing is decided by it.
        environ: The mapping to use instead of ``os.environ``.

    Raises:
        ConfigurationError: An argument or variable is missing or not allowed; the message says
            which. Nothing has been opened. Also raised when an elastic run is requested on a store
            that does not create objects exclusively.
        MissingDependencyError: The driver for the URI's scheme is not installed; the message names
            the package.
        StoreUnavailableError: The URI cannot be written and read. With every driver, an endpoint
            that never answers is reported within two minutes.
    """
    environ = os.environ if environ is None else environ
    if not isinstance(environ, Mapping):
        raise ConfigurationError(f"environ must be a mapping such as os.environ, not {environ!r}")
    check_told(environ, uri=uri, rank=rank, world_size=world_size)
    place = uri_of(uri, environ)
    has_identity = rank is not None and world_size is not None
    rank, world_size = check_identity(
        number_of(rank, "rank", "REPLICA_RANK", environ), world_size_of(world_size, environ)
    )
    if run_id is None:  # launchers by hand may set only the second
        run_id = environ.get("DILOCO_COHORT") or environ.get("DILOCO_RUN_ID", "")
    if not isinstance(run_id, str) or len(run_id) > _LONGEST_RUN_ID:
        raise ConfigurationError(
            f"run_id must be text of at most {_LONGEST_RUN_ID} characters, not {run_id!r:.100}"
        )
    limits = given(
        join_timeout=join_timeout,
        sync_timeout=sync_timeout,
        beat_interval=beat_interval,
        lost_after=lost_after,
        return_within=return_within,
    )
    membership = given(
        min_replicas=min_replicas,
        grace=grace,
        late=late,
        topology=topology,
        publish_every=publish_every,
        retention=retention,
        resume=resume,
    )
    elastic = elastic_of(elastic, membership)
    restarts = environ.get("DILOCO_RESTARTS") != "0"
    all_limits = timing_of(timing, limits, elastic=elastic is not None, restarts=restarts)
    others = given(chunk_bytes=chunk_bytes, transfer=transfer, process_group=process_group)
    others |= given(telemetry=telemetry)
    tells = yes_or_no("telemetry", True if telemetry is None else telemetry)
    arguments = {**limits, **membership, **others}
    arguments |= {} if timing is None else limits_of(all_limits)
    timing = all_limits
    arguments |= {} if elastic is None or membership else asdict(elastic)
    if elastic is not None:
        elastic.check(world_size, timing.sync_timeout)
    chunks = whole("chunk_bytes", CHUNK_BYTES if chunk_bytes is None else chunk_bytes)
    if chunks > _MOST_CHUNK_BYTES:
        raise ConfigurationError(
            f"chunk_bytes must be at most {_MOST_CHUNK_BYTES}, not {chunks}: every buffer has this "
            "size"
        )
    transfer = Transfer() if transfer is None else transfer
    settings_of("transfer", transfer, Transfer, "Transfer(connections=32)", {}).check()
    identity = {"world_size": world_size, "run_id": run_id}
    _forget_ended()
    with _lock:
        # One spelling for all the ways in which the same place can be written.
        spelling = place.rstrip("/") if "://" in place else whole_path(place).as_uri()
        key = os.getpid(), spelling, rank
        connected = _open.get(key)
        if connected is not None:
            _check_same(connected.settings, {**identity, **arguments}, redact_uri(place), rank)
            return connected.exchange
        settings = {**identity, **limits_of(timing), "chunk_bytes": chunks, "transfer": transfer}
        settings |= given(process_group=process_group, telemetry=tells)
        if elastic is None:
            settings |= {"min_replicas": None, "resume": resume or False}
        else:
            settings |= asdict(elastic)
        opened = partial(
            _new,
            place,
            transfer,
            (resume or False) if elastic is None else False,
            environ if tells else None,
            rank=rank,
            world_size=world_size,
            elastic=elastic,
            run_id=run_id,
            timing=timing,
            chunk_bytes=chunks,
            last_attempt=environ.get("DILOCO_LAST_ATTEMPT") == "1",
        )
        alone = has_identity and process_group is None
        inside = None if alone else processes_of(environ, process_group)
        if inside is None:
            exchange: Exchange = opened()
        else:
            # At the start, the leader waits for the run to begin, and then for all replicas.
            patience = 2 * timing.join_timeout + timing.sync_timeout
            leads = partial(_as_leader, opened)
            alike = {**settings, "uri": redact_uri(spelling)}
            exchange = ReplicaExchange(
                rank, world_size, *inside, leads, alike, patience, process_group
            )
        exchange.when_ended = _forget_ended
        _open[key] = _Connected(exchange, settings)
        return exchange


def _forget_ended() -> None:
    """Drop the references to exchanges that have ended, which would keep their models in memory."""
    with _lock:
        for key in [key for key, connected in _open.items() if connected.exchange.ended]:
            del _open[key]


def _check_same(
    settings: Mapping[str, object], given: Mapping[str, object], uri: str, rank: int
) -> None:
    """Refuse settings that differ from those of the open exchange, which cannot change them."""
    differing = [
        name for name, value in given.items() if name not in settings or settings[name] != value
    ]
    if differing:
        current = ", ".join(f"{name}={settings.get(name)!r}" for name in differing)
        texts = ", ".join(f"{name}={given[name]!r}" for name in differing)
        raise ConfigurationError(
            f"this process is already connected to {uri} as rank {rank} with {current}, and cannot "
            f"also connect with {texts}. Leave these arguments out to use the open connection, or "
            "pass the values that it was opened with."
        )


def _as_leader(opened: Callable[[], StoreExchange]) -> StoreExchange:
    exchange = opened()
    exchange.support = replace(exchange.support, lanes=True)
    return exchange


def _new(
    uri: str,
    transfer: Transfer,
    resume: bool | Literal["newest-whole"],
    tells: Mapping[str, str] | None,
    *,
    last_attempt: bool,
    **options: Any,
) -> StoreExchange:
    store = open_store(uri, transfer=transfer)
    if isinstance(store, FolderStore):
        store.of_earlier_run = bool(resume)
    try:
        exchange = StoreExchange(store, resume=resume, **options)
    except BaseException:
        store.unmake() if isinstance(store, FolderStore) else store.close()
        raise
    exchange.last_attempt = last_attempt
    if tells is not None:
        once = store.once() if isinstance(store, RemoteStore) else store
        exchange.telemetry = Telemetry(
            once, exchange.rank, exchange.world_size, exchange.run_id, options["timing"], tells
        )
    return exchange
