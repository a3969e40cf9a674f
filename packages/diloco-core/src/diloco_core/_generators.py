"""torch's default random generator, which all threads of a process share.

torch reads and sets its state under a lock of its own, and may let other Python threads run meanwhile. Two threads that do so
at the same time can wait for each other for ever, so all of ours take turns.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

TURNS = threading.RLock()
"""Held by whoever reads or sets the generator's state."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, the generator is as before afterwards; one thread at a time."""
    with TURNS, torch.random.fork_rng(devices=[]):
        yield
