"""Questions to others, asked in threads that end with this process if nobody answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(question: Callable[[], T]) -> Future[T]:
    """Ask in a thread, and return what will hold the answer, or the error that was raised."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - it is the answer, also a SystemExit
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer
