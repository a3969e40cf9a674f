"""The figures of a run beside those that the planner foresees."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from diloco_core import StoreModel, plan_exchange

from .s3 import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from diloco_core import ExchangePlan

    from .cohort import Cost, Outcome, Run


@dataclass(frozen=True, slots=True)
class Figures:
    """What something cost per replica.

    Attributes:
        seconds: Virtual seconds until the last replica was through.
        requests: Requests of a replica by kind, as a mean over the replicas.
        most: The largest number of requests of a replica, by kind.
        waits: Serial round trips of the replica that had most.
        sent: Bytes that a replica sent.
        received: Bytes that a replica received.
        dollars: For the requests of all replicas.
    """

    seconds: float
    requests: dict[str, float]
    most: dict[str, float]
    waits: float
    sent: float
    received: float
    dollars: float


def start_of(run: Run, outcome: Outcome) -> Figures:
    """The figures of a run's start."""
    return _figures(run, outcome.start)


def sync_of(run: Run, outcome: Outcome) -> Figures:
    """The figures of a sync: means over those that were measured."""
    each = [_figures(run, costs) for costs in outcome.syncs]
    return Figures(
        mean(figures.seconds for figures in each),
        _means([figures.requests for figures in each]),
        {kind: max(figures.most[kind] for figures in each) for kind in KINDS},
        mean(figures.waits for figures in each),
        mean(figures.sent for figures in each),
        mean(figures.received for figures in each),
        mean(figures.dollars for figures in each),
    )


def plan_of(run: Run, parameters: int) -> ExchangePlan:
    """What the planner says of a sync, if it is told how the store behaves."""
    s3 = run.s3
    store = StoreModel(
        connection_bandwidth=s3.connection,
        first_byte=s3.latency,
        put=s3.latency,
        poll=0.0,  # all replicas begin at once
        reads=_limited(s3.reads),
        writes=_limited(s3.writes),
        page=s3.page,
        put_price=s3.put_price,
        get_price=s3.get_price,
    )
    return plan_exchange(
        parameters,
        run.replicas,
        s3.network,
        topology="gather" if run.kind == "gather" else "sharded",
        fixed=run.kind == "fixed",
        publish_every=run.publish_every if run.kind == "gather" else None,
        codec=run.codec,
        clip=run.clip,
        tensors=run.tensors,
        store=store,
        transfer=run.transfer,
    )


def _limited(rate: float) -> float | None:
    return None if rate == math.inf else rate


def _figures(run: Run, costs: Sequence[Cost]) -> Figures:
    requests = sum((cost.requests for cost in costs), Counter())
    return Figures(
        max(cost.seconds for cost in costs),
        {kind: requests[kind] / len(costs) for kind in KINDS},
        {kind: max(cost.requests[kind] for cost in costs) for kind in KINDS},
        max(cost.waits for cost in costs),
        mean(cost.sent for cost in costs),
        mean(cost.received for cost in costs),
        run.s3.dollars(requests),
    )


def _means(each: Iterable[dict[str, float]]) -> dict[str, float]:
    each = list(each)
    return {kind: mean(requests[kind] for requests in each) for kind in KINDS}
