"""The random generators of a process: Python's, numpy's, and torch's on all of its devices.

All threads of a process share torch's default generator.

torch reads and sets its state under a lock of its own, and may let other Python threads run
meanwhile. Two threads that do so at the same time can wait for each other for ever, so all of ours
take turns.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

TURNS = threading.RLock()
"""Held by the thread that reads or sets the generator's state."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, the generator is as before afterwards; one thread at a time."""
    with TURNS, torch.random.fork_rng(devices=[]):
        yield


def random_state() -> dict[str, Any]:
    """The states of all generators."""
    python = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    with TURNS:
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
    state["python"] = [python[0], list(python[1]), python[2]]
    state["numpy"] = [
        str(kind),
        np.asarray(keys).tolist(),
        int(position),
        int(has_gauss),
        float(gauss),
    ]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from saved states.

    Those of GPUs are left out if there is another number of them now.
    """
    with TURNS:
        torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
