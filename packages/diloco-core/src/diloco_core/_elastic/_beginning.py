"""Who brings the initial state of a run: signs of whoever is at it, and the wait of the others.

Whoever begins a run says so before it uploads anything, and again and again while the upload lasts. The others need no
clock in common with it: they see that what it says has changed, and measure with their own clock since then.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, RendezvousTimeoutError, StoreError
from .._timing import Wait
from ._log._keys import BEGINNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .._store._patient import Patient
    from .._timing import Timing
    from ._log._records import Manifest

_SIGNS = (
    4  # in a grace: a few may be late, or not be seen, before anybody takes their sender for dead
)
_LOOKS = 8  # in a grace
_LOOK_SECONDS = 2.0
_STAGGER = 0.5
_LARGEST = 4096

_log = logging.getLogger("diloco_core")


@contextmanager
def beginning(
    store: Patient, timing: Timing, *, rank: int, run_id: str, grace: float
) -> Iterator[None]:
    """While this lasts, the others see that this replica brings the initial state, and wait."""
    nonce, count = secrets.token_hex(8), itertools.count()

    def say() -> None:
        sign = {"rank": rank, "run_id": run_id, "nonce": nonce, "sign": next(count)}
        store.put(BEGINNING, lambda: [json.dumps(sign).encode()])

    def say_again() -> None:
        try:
            say()
        except (StoreError, OSError) as error:
            # Not fatal by itself: the next sign may get through in time.
            _log.warning(
                "rank %d could not show the others that it begins the run: %s", rank, error
            )

    say()
    stop = timing.repeat(min(timing.beat_interval, grace / _SIGNS), say_again)
    try:
        yield
    finally:
        stop()
    store.delete([BEGINNING])


def wait_for_manifest(
    read: Callable[[], Manifest | None],
    store: Patient,
    timing: Timing,
    *,
    rank: int,
    world_size: int,
    grace: float,
) -> Manifest | None:
    """The manifest, once there is one; None when it is for this replica to begin the run.

    That is when nobody has been seen to begin it for one grace. The ranks wake up one after another, so that only one
    begins where rank 0 does not come.

    Args:
        read: Reads the manifest, if there is one.
        store: Where it will be.
        timing: Clock, sleep and limits.
        rank: This replica; not 0, who does not wait.
        world_size: How many ranks there may be.
        grace: In seconds.

    Raises:
        RendezvousTimeoutError: There is none after ``join_timeout``, and nobody has been seen to begin the run for as long.
    """
    seen: bytes | None = None
    seen_at: float | None = None  # seconds since the wait began

    def late() -> Exception:
        return RendezvousTimeoutError(
            f"nobody began the run at {store.uri} within {timing.join_timeout:g} s", [0]
        )

    def notice(seconds: float) -> str:
        doing = "nobody has begun it yet"
        if seen_at is not None:
            doing = f"the last sign of somebody who uploads the initial state was seen {seconds - seen_at:.0f} s ago"
        return (
            f"rank {rank} has waited {seconds:.0f} s for the run at {store.uri} to begin: {doing}"
        )

    wait = Wait(
        timing,
        store.near,
        timing.join_timeout,
        lambda: None,
        late,
        downtime=lambda: store.downtime,
        notice=notice,
    )
    patience = grace + (rank - 1) * min(_STAGGER, grace / max(10, world_size))
    turn, look_at = patience, 0.0
    while (manifest := read()) is None:
        now = wait.elapsed()
        if now >= min(look_at, turn):
            look_at = now + min(_LOOK_SECONDS, grace / _LOOKS)
            sign = _sign(store)
            # Whatever it says: also one who begins another run, or has another version, will be known by the manifest.
            if sign is not None and sign != seen:
                seen, seen_at, turn = sign, now, now + patience
                wait.extend()
        if now >= turn:
            text = (
                "nobody has begun the run at %s"
                if seen_at is None
                else "whoever was beginning the run at %s gave no sign of it"
            )
            text = f"rank %d: {text} within the grace of %g s, so it begins with this replica's initial values"
            _log.warning(text, rank, store.uri, grace)
            return None
        wait.pause()
    return manifest


def _sign(store: Patient) -> bytes | None:
    try:
        return store.get(BEGINNING, _LARGEST)
    except CorruptedObjectError:  # too large for a sign
        return None
