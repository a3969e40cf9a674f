"""An estimate of an exchange's time, bytes, requests and money, before a machine is paid for.

The planner follows the exchanges request by request, with their sizes and limits (:mod:`._model`),
over a store that behaves as a :class:`StoreModel` says. ``hatch run bench-scale`` measures the same
in virtual time; ``docs/scale.md`` shows both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from diloco_protocol.telemetry import history_seconds, live_seconds

from .._checks import MOST_RANKS, check_positive, kind_of, number, one_of, whole, yes_or_no
from .._codecs._codec import Codec, check_state_codec, whole_state_every
from .._codecs._named import find_codec
from .._errors import ConfigurationError
from .._seconds import Seconds
from .._store._transfer import Transfer
from ._costs import StoreModel, check_amount
from ._model import Model, gather_sync, sharded_sync

_DAY = 24 * 3600.0
_AT_THE_END = 3  # telemetry objects: how an incarnation has ended, and live/ and history/ again
TOPOLOGIES = ("sharded", "gather")
USUAL_BANDWIDTH = 1.25e9
"""Bytes per second of a modest network card (10 Gb/s).

It is assumed where the bandwidth is not given.
"""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Hold what one sync costs one replica, and what it costs all replicas together.

    Numbers of requests are means over the replicas, and over syncs where these differ. Telemetry
    (:func:`connect`) goes by the clock, and is in no other figure than the last two.

    Attributes:
        topology: ``"sharded"`` (the owners of shards update and publish them) or ``"gather"``
            (every replica reads all contributions).
        seconds: From the moment when all replicas begin the sync until the last one has finished
            it. The time that computing takes is left out.
        bytes_sent: The bytes of the objects that a replica sends: its contribution, its part of the
            published state with the outer state, and records, with their headers and checksums.
            :class:`SyncReport` has contributions and published state alone. What HTTP has around
            each request, some 400 bytes up and 500 down over S3, is not included.
        bytes_received: The bytes that it receives, likewise.
        puts: Write requests of a replica; each part, beginning and end of an upload is one.
        gets: Read requests of a replica.
        lists: LIST requests of a replica.
        deletes: DELETE requests of a replica.
        cost: US dollars for the requests of all replicas together, and for what they receive if
            that leaves the store's region (``StoreModel.egress_price``).
        memory_bytes: The memory that the outer loop takes on a replica (the local and global copy
            in fp32, and outer state), without buffers. A ``delay`` adds a copy of the fragment that
            is under way, and ``error_feedback`` a copy of the model and two of that fragment.
        telemetry_puts: Write requests of a replica per day by which it tells what it does, at most.
            Each further end of an incarnation on that day adds three.
        telemetry_cost: US dollars per day for those of all replicas together.
    """

    topology: str
    seconds: float
    bytes_sent: float
    bytes_received: float
    puts: float
    gets: float
    lists: float
    deletes: float
    cost: float
    memory_bytes: float
    telemetry_puts: float
    telemetry_cost: float

    def exposed(self, overlap: float = 0.0) -> float:
        """Return the seconds of a sync in which a replica does not train.

        Reports have them as :attr:`SyncReport.exposed_seconds`.

        Args:
            overlap: How many seconds a sync may take without stopping the training: the duration of
                ``delay`` inner steps. Taking what is sent, and adopting the result, are not
                counted; they take as long as copying the values.

        Raises:
            ConfigurationError: ``overlap`` is below 0, or not a number.
        """
        if number("overlap", overlap) < 0:
            raise ConfigurationError(f"overlap is {overlap:g} s, but must be 0 or more")
        return max(0.0, self.seconds - overlap)

    def hidden(self, overlap: float = 0.0) -> float:
        """Return the seconds of a sync beside which a replica trains.

        Reports have them as :attr:`SyncReport.hidden_seconds`. ``overlap`` is as in
        :meth:`exposed`.
        """
        return self.seconds - self.exposed(overlap)

    def blocked(self, period: float | Seconds, overlap: float = 0.0) -> float:
        """The share of time in which a replica does not train because of syncs.

        Args:
            period: Seconds of training between two syncs (those of ``sync_every / fragments`` inner
                steps; or, if ``sync_every`` is a :class:`Seconds`, its value divided by the number
                of fragments).
            overlap: How many of these seconds a sync may take without stopping the training; see
                :meth:`exposed`.

        Raises:
            ConfigurationError: ``overlap`` is not from 0 to ``period``, or ``period`` is not a
                number of at least 0.
        """
        if isinstance(period, Seconds):
            raise ConfigurationError(
                f"period must be a number of seconds, not {period}: the fragments are synced in "
                "turn, so divide the seconds by their number. With two fragments, pass "
                f"{period.value / 2:g}"
            )
        if number("period", period) < 0:
            raise ConfigurationError(f"period is {period:g} s, but must be 0 or more")
        if not 0 <= number("overlap", overlap) <= period:
            raise ConfigurationError(
                f"overlap is {overlap:g} s, but must be from 0 to the period of {period:g} s: a "
                "sync is adopted before the next one is sent"
            )
        exposed = self.exposed(overlap)
        return exposed / (exposed + period)


@contextlib.contextmanager
def _in_range() -> Iterator[None]:
    """Refuse what no float can hold.

    Raises:
        ConfigurationError: A number overflowed.
    """
    try:
        yield
    except (OverflowError, ZeroDivisionError) as error:
        raise ConfigurationError(
            "the arguments, those of store included, are so large or so small that the plan's "
            "numbers cannot be computed: give sizes in bytes, and rates per second"
        ) from error


@_in_range()
def plan_exchange(
    params: float,
    replicas: int,
    bandwidth: float,
    *,
    bytes_per_param: float = 4.0,
    outer_state: float = 1.0,
    fragments: int = 1,
    topology: str = "auto",
    fixed: bool = False,
    publish_every: int | None = None,
    codec: str | Codec = "plain",
    state_codec: str | Codec = "plain",
    full_state_every: int | None = None,
    clip: str | None = None,
    tensors: int = 100,
    store: StoreModel | None = None,
    transfer: Transfer | None = None,
) -> ExchangePlan:
    """Estimate the costs of one sync in the middle of a run in which no replica is late.

    They are right to about 5 %. The requests are those of the obstore driver. s3fs sends others: it
    opens an object with a HEAD, writes every large object in parts, half as many of them at once,
    and deletes objects one by one. Saving what belongs to a single replica (``save_inner_every``)
    is not included.

    Args:
        params: Number of parameters that are synced.
        replicas: Number of replicas, at most 100,000.
        bandwidth: Bytes per second that one replica can move in each direction, such as 12.5e9 for
            a network card of 100 Gb/s.
        bytes_per_param: Bytes of a parameter where it is not encoded: 4 for models in fp32 and
            narrower dtypes, 8 for float64.
        outer_state: The number of tensors of a parameter's size that the outer optimizer keeps for
            it, and that are published with it: 1 for SGD with momentum, 0 without, 2 for Adam.
        fragments: The number of fragments. A sync moves one of them, which is taken to hold its
            equal share of the parameters.
        topology: ``"sharded"``, ``"gather"``, or ``"auto"`` for the quicker one. Fixed runs are
            always sharded.
        fixed: Whether membership is fixed: then a replica does not send the part of its
            contribution that only it uses.
        publish_every: In the gather topology, the number of syncs from one publication of the state
            to the next; 4 if left out. All figures are means over these syncs.
        codec: How contributions are sent, as given to :class:`DiLoCo`.
        state_codec: How results are published, as given to :class:`DiLoCo`. Such runs are always
            sharded.
        full_state_every: With a ``state_codec``: the number of syncs of a fragment from one whole
            publication to the next; 8 if left out. The figures are means over these syncs.
        clip: As given to :class:`DiLoCo`: with ``"median"``, the norms of every contribution are
            read too.
        tensors: How many tensors are synced. Only small syncs depend on it: it counts in the
            manifest, which is looked at once in a while, and in the norms.
        store: How the store behaves; like S3 if left out.
        transfer: How the replicas read and write, as given to :func:`connect`. (That function also
            checks how many connections its process may open.)

    Returns:
        The plan for the topology that was given or, for ``"auto"``, for the quicker one.

    Raises:
        ConfigurationError: An argument is not allowed. The message names it and says what is
            expected.
    """
    store = StoreModel() if store is None else store
    transfer = Transfer() if transfer is None else transfer
    for name, value, kind in (("store", store, StoreModel), ("transfer", transfer, Transfer)):
        if not isinstance(value, kind):
            raise ConfigurationError(f"{name} must be a {kind.__name__}, not {kind_of(value)}")
    check_positive("params", params)
    check_positive("bandwidth", bandwidth)
    check_positive("bytes_per_param", bytes_per_param)
    replicas = whole("replicas", replicas)
    if replicas > MOST_RANKS:
        raise ConfigurationError(f"replicas must be at most {MOST_RANKS:,}, not {replicas}")
    fragments, tensors = whole("fragments", fragments), whole("tensors", tensors)
    every = whole("publish_every", 4 if publish_every is None else publish_every)
    check_amount("outer_state", outer_state, " of tensors")
    one_of("topology", topology, ("auto", *TOPOLOGIES))
    if yes_or_no("fixed", fixed) and topology == "gather":
        raise ConfigurationError(
            "runs with fixed membership always use the sharded topology: topology='gather' is for "
            "elastic runs (fixed=False)"
        )
    published = find_codec(state_codec)
    check_state_codec(published, gather=topology == "gather")
    full_every = whole_state_every(published, full_state_every)
    if not published.plain and outer_state > 1:
        raise ConfigurationError(
            f"outer_state is {outer_state:g}, but with a state_codec it can be at most 1: only SGD "
            "can be the outer optimizer then, with its momentum or without"
        )
    if clip is not None:
        one_of("clip", clip, ("median",))
    size = params * bytes_per_param / fragments
    model = Model(
        size,
        size * outer_state,
        replicas,
        transfer,
        fixed=fixed,
        codec=find_codec(codec),
        state_codec=published,
        full_every=full_every,
        clip=clip is not None,
        tensors=tensors,
    )
    each = {"sharded": sharded_sync(model, store, bandwidth)}
    if not fixed and published.plain:
        each["gather"] = gather_sync(model, every, store, bandwidth)
    quickest = min(each, key=lambda name: each[name].seconds)
    chosen = quickest if topology == "auto" else topology
    if publish_every is not None and chosen == "sharded":
        raise ConfigurationError(
            f"publish_every={publish_every} has no effect on the sharded topology, which publishes "
            "the state in every sync. Leave publish_every out, or pass topology='gather'"
        )
    costs, count = each[chosen], each[chosen].requests
    dollars = (count["PUT"] + count["LIST"]) * store.put_price + count["GET"] * store.get_price
    dollars += costs.received * store.egress_price
    residual = 0 if published.plain else size
    puts = _DAY / live_seconds(replicas) + _DAY / history_seconds(replicas) + _AT_THE_END
    outer = (model.outer_state + residual) / (1 if chosen == "gather" else replicas)
    plan = ExchangePlan(
        topology=chosen,
        seconds=costs.seconds,
        bytes_sent=costs.sent,
        bytes_received=costs.received,
        puts=count["PUT"],
        gets=count["GET"],
        lists=count["LIST"],
        deletes=count["DELETE"],
        cost=replicas * dollars,
        memory_bytes=4 * params + fragments * (size + outer),
        telemetry_puts=puts,
        telemetry_cost=replicas * puts * store.put_price,
    )
    _, *numbers = astuple(plan)
    if not all(map(math.isfinite, numbers)):
        raise OverflowError("a number of the plan")
    return plan
