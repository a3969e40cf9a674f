"""Limit the lists of this process: the service allows two per second for the whole account."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from diloco_protocol import Backoff

SECONDS_PER_LIST = 0.5
_MOST_CLOCKS = 16  # a process has one; tests have many
_lock = threading.Lock()
_next: OrderedDict[Callable[[], float], float] = OrderedDict()


def wait_for_turn(backoff: Backoff) -> None:
    """Sleep until this process may list again; all executors together get turns in order."""
    with _lock:
        now = backoff.clock()
        turn = max(now, _next.get(backoff.clock, now))
        _next[backoff.clock] = turn + SECONDS_PER_LIST
        _next.move_to_end(backoff.clock)
        while len(_next) > _MOST_CLOCKS:
            _next.popitem(last=False)
    if turn > now:
        backoff.sleep(turn - now)
