"""A warning about syncs that are long compared with the time that replicas wait for each other.

It is given at the start of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .._codecs._plain import PLAIN
from .._store._api import InBackground, Store
from .._terms._terms import DEFAULT, Terms
from ._plan import USUAL_BANDWIDTH, plan_exchange

_BITS = 8

_log = logging.getLogger("diloco_core")


def warn_of_long_syncs(
    size: int,
    *,
    rank: int,
    replicas: int,
    store: Store,
    sync_timeout: float,
    fixed: bool,
    topology: str = "sharded",
    publish_every: int = 1,
    outer_state: Callable[[], float] = lambda: 1.0,
    terms: Terms = DEFAULT,
) -> None:
    """Log a warning if a slow replica could make the others give up a sync.

    The warning has the figures, and says what helps.

    ``sync_timeout`` limits how long a replica waits for the others, not how long it is itself busy
    with a sync. If all are equally fast, they hardly wait. For a replica that is half as fast, they
    wait as long as a part of the sync takes.

    The network is not known here, so a usual one and S3 are assumed. Folders need no plan.

    Args:
        size: Bytes of the values in a contribution to the largest sync, before they are encoded; if
            it is 0, nothing is logged.
        rank: The rank of this replica.
        replicas: How many replicas there are.
        store: The store where they meet.
        sync_timeout: Seconds after which a replica no longer waits for the others.
        fixed: Whether membership is fixed.
        topology: The topology of an elastic run.
        publish_every: How often an elastic run publishes its state; see :func:`plan_exchange`.
        outer_state: Returns how many tensors the outer optimizer keeps for every parameter.
        terms: How contributions are sent, and how state is published.
    """
    if store.near or not size:
        return
    coding = terms.coding
    width = torch.float32.itemsize
    plan = plan_exchange(
        size / width,
        replicas,
        USUAL_BANDWIDTH,
        bytes_per_param=width,
        outer_state=outer_state(),
        topology=topology,
        fixed=fixed,
        publish_every=publish_every,
        codec=terms.codec,
        state_codec=PLAIN if coding is None else coding.codec,
        full_state_every=1 if coding is None else coding.full_every,
        transfer=store.transfer if isinstance(store, InBackground) else None,
    )
    if plan.longest_part <= sync_timeout:
        return
    _log.warning(
        "rank %d: a sync of %.3g GB between %d replicas takes about %.3g s. The longest part of "
        "it between two points at which all wait for each other takes %.3g s. The others would "
        "have to wait as long as that for a replica that is half as fast as they are, but they "
        "wait only for sync_timeout (%g s) and would then give up the sync. This is an estimate "
        "for S3 and a network of %g Gb/s: every replica sends %.3g GB and receives %.3g GB with "
        "%.0f requests. A larger sync_timeout gives a slow replica more time. %s",
        rank,
        size / 1e9,
        replicas,
        plan.seconds,
        plan.longest_part,
        sync_timeout,
        USUAL_BANDWIDTH * _BITS / 1e9,
        plan.bytes_sent / 1e9,
        plan.bytes_received / 1e9,
        plan.gets + plan.puts + plan.lists + plan.deletes,
        " ".join(plan.limits or ("With more fragments, each sync moves less.",)),
    )
