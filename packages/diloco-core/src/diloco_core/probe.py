"""Tests from a replica's machine whether a store can serve as a rendezvous: the entrypoint ``diloco_core.probe:run``."""

from __future__ import annotations

import time
from typing import Any

from ._store._api import creates_once
from ._store._open import open_store


def run(uri: str) -> dict[str, Any]:
    """Write, read, list, create twice and remove a small object under a prefix.

    Args:
        uri: The prefix, as for :func:`diloco_core.connect`; nothing is left there.

    Returns:
        ``exclusive`` (whether an object can be created only once, as elastic runs need) and ``seconds`` (for all of it).

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
