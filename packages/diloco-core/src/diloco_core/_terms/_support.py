"""Let an exchange say what it can do for an outer loop, once, when it is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._errors import ConfigurationError
from .._timing import in_thread

ONE_PROCESS = (
    "over this exchange one process is one replica. To train one replica with several processes, "
    "call torch.distributed.init_process_group() and then connect() without rank= and world_size= "
    "in each of them"
)
WITHOUT_STORE = (
    "To train with the process group of all replicas instead of a store, pass "
    "ProcessGroupExchange()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """List what an exchange can do beyond plain means of values as they are in memory.

    Attributes:
        codecs: Whether contributions are sent as ``Terms.codec`` encodes them. If not, a codec is
            refused.
        weighs: Whether contributions are weighed, trimmed and clipped; if not, all are refused.
        state_codecs: Whether state can be published encoded. If not, a codec for it is refused.
        delays: Whether a sync may be carried out by another thread while the replica trains. If
            not, a delay is refused.
        agrees_on_lr: Whether all replicas take an outer step with the same learning rate, chosen of
            those that they propose. If not, it cannot be changed.
        compares_lr: Whether replicas that propose different learning rates are refused. If not, the
            rate must be constant.
        lanes: Whether a replica may be several processes that hold a model together, each with an
            exchange of its own.
        gather: Whether every replica updates every shard, so that few syncs publish their state.
        keeps_state: Whether its store keeps the run's state, so that the run can be continued.
        takes_run: Whether a replica that comes takes the run's state, whatever it holds itself.
        fewest: The least number of replicas that take part in a sync; None: all of them.
        begins_behind: Whether a thread that does not train may also begin a sync.
        in_background: How that thread is started; see :class:`.Timing`.
        clock: A monotonic clock, in seconds.
        check_window: Refuses lengths of windows, in seconds, that do not fit the exchange's limits.
            None: replicas cannot contribute by the time.
    """

    codecs: bool = False
    weighs: bool = False
    state_codecs: bool = False
    delays: bool = False
    agrees_on_lr: bool = False
    compares_lr: bool = False
    lanes: bool = False
    gather: bool = False
    keeps_state: bool = False
    takes_run: bool = False
    fewest: int | None = None
    begins_behind: bool = True
    in_background: Callable[[Callable[[], object]], Callable[[float | None], bool]] = in_thread
    clock: Callable[[], float] = time.monotonic
    check_window: Callable[[float], None] | None = None


EVERYTHING_SENT = Support(
    codecs=True, weighs=True, state_codecs=True, delays=True, agrees_on_lr=True
)
"""The abilities of exchanges that send contributions and state as the terms of the run say.

Each such exchange has more of its own.
"""


def support_of(exchange: object) -> Support:
    """Return what an exchange can do; one that does not say so can do nothing but take means."""
    support = getattr(exchange, "support", None)
    return support if isinstance(support, Support) else Support()


def check_process_group(exchange: object, way_out: str = WITHOUT_STORE) -> None:
    """Refuse a process that is in a group with others while its exchange meets over a store.

    It may have entered the group since the exchange was made.

    Raises:
        ConfigurationError: The message says what was found, and what to do.
    """
    group, support = torch.distributed, support_of(exchange)
    in_group = group.is_available() and group.is_initialized()
    size = group.get_world_size() if in_group else 1
    if size > 1 and support.keeps_state and not support.lanes:
        raise ConfigurationError(
            f"this process is in a torch.distributed group of {size} processes, and the exchange "
            f"meets over a store: {ONE_PROCESS}. Or start each replica as a process of its own, "
            f"without init_process_group(). {way_out}"
        )
