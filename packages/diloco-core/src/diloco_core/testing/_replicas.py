"""Several replicas in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from .._exchange._base import Exchange

T = TypeVar("T")


def run_replicas(
    train: Callable[[Exchange], T], exchanges: Sequence[Exchange], *, timeout: float = 600.0
) -> list[T | BaseException]:
    """Call ``train(exchange)`` in one thread per exchange.

    Return what each call returned or raised, in the order of the exchanges. Torch's global random
    generator is shared by all threads: give every replica a ``torch.Generator`` of its own.

    Raises:
        TimeoutError: A thread is still running after ``timeout`` seconds.
    """
    results: list[T | BaseException] = [RuntimeError("not run")] * len(exchanges)

    def replica(number: int) -> None:
        try:
            results[number] = train(exchanges[number])
            exchanges[number].leave()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            results[number] = error
            exchanges[number].abort(error)

    threads = [
        threading.Thread(target=replica, args=(number,), daemon=True)
        for number in range(len(exchanges))
    ]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"replica {number} is still running after {timeout:g} s")
    return results
