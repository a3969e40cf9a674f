"""Which replica uploads the initial state of a run: the signs that it gives meanwhile, and how the others wait for it.

The replica that begins a run writes a sign before it uploads anything, and repeats it while the upload lasts. No common clock
is needed: the others see that the sign has changed, and measure the time since then with their own clocks.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._errors import RendezvousTimeoutError
from ._records._keys import BEGINNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .._store._patient import Patient
    from ._records._manifest import Manifest
    from ._settings import Joiner

# Signs in a grace. A few of them may be late or not be seen before the other replicas consider the sender dead.
_SIGNS = 4
_LOOKS = 8  # in a grace
_LOOK_SECONDS = 2.0
_STAGGER = 0.5
_LARGEST = 4096

_log = logging.getLogger("diloco_core")


@contextmanager
def beginning(store: Patient, joiner: Joiner) -> Iterator[None]:
    """Show the other replicas, as long as this context lasts, that this one uploads the initial state, so that they wait."""
    nonce, count = secrets.token_hex(8), itertools.count()

    def give_sign() -> None:
        sign = {"rank": joiner.rank, "run_id": joiner.run_id, "nonce": nonce, "sign": next(count)}
        store.put(BEGINNING, lambda: [json.dumps(sign).encode()])

    give_sign()
    seconds = min(store.timing.beat_interval, joiner.settings.grace / _SIGNS)
    failure = (
        f"rank {joiner.rank} could not show the other replicas, one of which begins the run with its own values if it sees no "
        "sign for a grace, that this one is uploading the initial state of the run"
    )
    stop = store.repeat(seconds, give_sign, failure)
    try:
        yield
    finally:
        stop()
    store.delete([BEGINNING])


def wait_for_manifest(
    store: Patient,
    joiner: Joiner,
    read: Callable[[], Manifest | None],
    look_around: Callable[[], None] = lambda: None,
) -> Manifest | None:
    """Wait for the manifest. Returns it, or None if this replica should begin the run.

    It should if, for a grace, it has seen no sign that another replica begins the run. The ranks stop waiting one after
    another, so that only one of them begins the run if rank 0 does not come. In a fixed run nobody begins in the place of rank 0.

    Args:
        store: Where it will be.
        joiner: This replica; not rank 0, which does not wait.
        read: Reads the manifest; returns None if there is none.
        look_around: Called from time to time; raises an error if waiting any longer is of no use.

    Raises:
        RendezvousTimeoutError: There is no manifest after ``join_timeout``, and no sign was seen for that time either.
    """
    rank, timing = joiner.rank, store.timing
    grace = math.inf if joiner.settings.fixed else joiner.settings.grace
    last_sign: bytes | None = None
    last_sign_at: float | None = None  # seconds since the wait began

    def timed_out() -> Exception:
        return RendezvousTimeoutError(
            f"no replica began the run at {store.uri} within {timing.join_timeout:g} s. Look at the log of rank 0, which "
            "usually begins the run. A larger join_timeout gives it more time.",
            [0],
        )

    def notice(seconds: float) -> str:
        progress = "no replica has begun it yet"
        if last_sign_at is not None:
            progress = (
                "another replica is uploading the initial state, and gave its last sign "
                f"{seconds - last_sign_at:.0f} s ago"
            )
        return f"rank {rank} has waited {seconds:.0f} s for the run at {store.uri} to begin: {progress}"

    wait = store.wait(timing.join_timeout, timed_out, look_around, notice=notice)
    patience = grace + (rank - 1) * min(_STAGGER, grace / max(10, joiner.world_size))
    turn, look_at = patience, 0.0
    while (manifest := read()) is None:
        now = wait.elapsed()
        if now >= min(look_at, turn):
            look_at = now + min(_LOOK_SECONDS, grace / _LOOKS)
            sign = store.peek(BEGINNING, _LARGEST)
            # What the sign says does not matter: if its sender begins another run, or has another version, the manifest will
            # show it.
            if sign and sign != last_sign:
                last_sign, last_sign_at, turn = sign, now, now + patience
                wait.extend()
        if now >= turn:
            reason = (
                "no replica has begun the run at %s"
                if last_sign_at is None
                else "the replica that was beginning the run at %s has given no sign"
            )
            message = f"rank %d: {reason} within the grace of %g s, so this replica begins it with its own initial values"
            _log.warning(message, rank, store.uri, grace)
            return None
        wait.pause()
    return manifest
