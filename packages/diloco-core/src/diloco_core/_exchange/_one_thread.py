"""Syncs calculate in one thread.

An exchange works chunk by chunk, and a chunk of 1 MiB is too small to gain from several threads:
they cost more to start and to wait for than they save. Where several replicas share a machine it is
much worse, because torch gives each as many threads as there are cores, and the threads of one
replica spin while they wait for one that the other replica keeps from its core: on 16 cores, two
replicas took 15 s for a sync of 100 million parameters that takes 0.6 s with few threads.

``torch.set_num_threads`` would not do. It is meant for the whole process, and a sync with a delay
runs beside the training. OpenMP itself keeps the number for each thread that starts others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread for what the calling thread calculates.

    The number of threads that it uses for others does not change.
    """
    torch.get_num_threads()  # at the first use in a thread torch sets a number; let that be over
    with _openmp().limit(limits=1):
        yield


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
