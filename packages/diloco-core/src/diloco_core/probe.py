"""Tests whether a store can serve as a rendezvous, from the machine where a replica would run.

A launcher names the entrypoint ``diloco_core.probe:run``. By hand::

    python -m diloco_core.probe s3://bucket/run-1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_protocol import DilocoError

from ._errors import ConfigurationError
from ._store._api import creates_once
from ._store._open import open_store


def run(uri: str) -> dict[str, Any]:
    """Write, read, list, create twice and remove a small object under a prefix.

    Args:
        uri: The prefix, as for :func:`diloco_core.connect`. No object is left there; in a file
            system, empty folders are.

    Returns:
        ``exclusive`` (whether an object can be created only once, as elastic runs need) and
        ``seconds`` (for all of it).

    Raises:
        ConfigurationError: The URI is malformed, or its scheme is unknown.
        StoreUnavailableError: It cannot be written and read; says what to check.
        MissingDependencyError: The driver of its scheme is not installed here.
    """
    began = time.monotonic()
    store = open_store(uri)
    try:
        exclusive = creates_once(store)
    finally:
        store.close()
    return {"exclusive": exclusive, "seconds": round(time.monotonic() - began, 3)}


def in_words(found: Mapping[str, Any]) -> str:
    """Return the result of :func:`run` as a sentence."""
    use = (
        "and an object can be created only once: all runs can use this store"
        if found["exclusive"]
        else "but an object can be created twice: fixed runs can use this store, but no rank can "
        "come back to them by itself; elastic runs cannot use it"
    )
    return f"a small object was written, read, listed and removed in {found['seconds']} s, {use}"


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
        found = run(parser.parse_args(argv).uri)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except DilocoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{in_words(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
