"""Tests whether a store can serve as a rendezvous, from the machine where a replica would run.

A launcher names the entrypoint ``diloco_core.probe:run``. By hand::

    python -m diloco_core.probe s3://bucket/run-1
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from diloco_protocol import DilocoError

from ._errors import ConfigurationError
from ._store._api import Store, creates_once
from ._store._open import open_store

_ROUNDS = 5
_LARGE = 8 * 2**20  # bytes


def run(uri: str, *, measured: bool = False) -> dict[str, Any]:
    """Write, read, list, create twice and remove a small object under a prefix.

    Args:
        uri: The prefix, as for :func:`diloco_core.connect`. No object is left there; in a file
            system, empty folders are.
        measured: Whether to measure latency and bandwidth as well.

    Returns:
        ``exclusive`` (whether an object can be created only once, as elastic runs need),
        ``seconds`` (for all of that), and what :func:`measure` returns if it was asked for.

    Raises:
        ConfigurationError: The URI is malformed, or its scheme is unknown.
        StoreUnavailableError: It cannot be written and read; says what to check.
        MissingDependencyError: The driver of its scheme is not installed here.
    """
    began = time.monotonic()
    store = open_store(uri)
    try:
        exclusive = creates_once(store)
        seconds = round(time.monotonic() - began, 3)
        more = measure(store) if measured else {}
    finally:
        store.close()
    return {"exclusive": exclusive, "seconds": seconds, **more}


def measure(store: Store, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Return how fast one object after the other is written and read; none is left.

    Returns:
        ``write_ms`` and ``read_ms``, the middle of a few small objects, and ``write_mb_s`` and
        ``read_mb_s`` (10⁶ bytes per second), of one object of 8 MiB.
    """
    keys = [f"probes/{secrets.token_hex(8)}" for _ in range(_ROUNDS + 1)]

    def took(act: Callable[[], object]) -> float:
        began = clock()
        act()
        return max(clock() - began, 1e-9)  # of a clock that has not moved

    def both(key: str, data: bytes) -> tuple[float, float]:
        return took(lambda: store.put(key, [data])), took(lambda: store.get(key))

    try:
        writes, reads = zip(*(both(key, b"small") for key in keys[:-1]), strict=True)
        write, read = both(keys[-1], secrets.token_bytes(_LARGE))
    finally:
        store.delete(keys)
    return {
        "write_ms": round(1e3 * median(writes), 3),
        "read_ms": round(1e3 * median(reads), 3),
        "write_mb_s": round(_LARGE / 1e6 / write, 1),
        "read_mb_s": round(_LARGE / 1e6 / read, 1),
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Return the result of :func:`run` as a sentence."""
    use = (
        "and an object can be created only once: all runs can use this store"
        if found["exclusive"]
        else "but an object can be created twice: fixed runs can use this store, but no rank can "
        "come back to them by itself; elastic runs cannot use it"
    )
    return f"a small object was written, read, listed and removed in {found['seconds']} s, {use}"


def speed_in_words(found: Mapping[str, Any]) -> str:
    """Return the result of :func:`measure` as a sentence."""
    return (
        f"a small object is written in {found['write_ms']:g} ms and read in {found['read_ms']:g} "
        f"ms, and one of 8 MiB at {found['write_mb_s']:g} and {found['read_mb_s']:g} MB/s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 0 if the store can be used (a sentence says for which runs), 1 if it
        cannot. 2 if the arguments are wrong, among them a URI that is malformed or whose scheme is
        unknown; argparse exits by itself if one is missing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m diloco_core.probe",
        description="Write, read, list, create twice and remove a small object in a store, as a "
        "run would.",
    )
    parser.add_argument("uri", help="the prefix: a folder or s3://…; no object is left there")
    try:
        report = run(parser.parse_args(argv).uri)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except DilocoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{in_words(report)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
