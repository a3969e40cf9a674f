"""Make the same calls for many ranks, on an event loop.

A thread for each call of Modal's client would take more than twice as long.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from diloco_protocol import BackendError, Backoff, UnavailableError, retry

from ._errors import meant, shown_cause

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 32


def at_once(work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T]) -> list[R]:
    """Return what ``work`` returns for each item, in order.

    May also be called while an event loop is running. After an error or Ctrl-C no more work is
    begun, and work under way is waited for, so that its outcome is known.

    Raises:
        Exception: The first error of ``work``.
    """
    over = threading.Event()

    async def run() -> list[R]:
        # Calls that are throttled wait in these threads.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE))
        left, answers, errors = iter(enumerate(items)), {}, []

        async def worker() -> None:
            for index, item in left:
                try:
                    answers[index] = await work(item)
                except Exception as error:  # noqa: BLE001 - raised below, when all have come back
                    errors.append(error)
                    over.set()
                if over.is_set():
                    return

        await asyncio.gather(*(worker() for _ in range(min(AT_ONCE, len(items)))))
        if errors:
            raise errors[0]
        return [answers[index] for index in sorted(answers)]

    if not items:
        return []
    with ThreadPoolExecutor(1, thread_name_prefix="diloco-modal") as pool:
        future = pool.submit(_run, run)
        try:
            return future.result()
        except BaseException:
            over.set()
            raise


def _run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine as :func:`asyncio.run` does.

    Raises:
        UnavailableError: There can be no event loop, for example if no file descriptor is left.
    """
    runner = asyncio.Runner()
    try:
        runner.get_loop()
    except OSError as error:
        raise UnavailableError(f"Modal cannot be asked without an event loop: {error}") from error
    with runner:
        return runner.run(main())


async def bounded(call: Awaitable[T], seconds: float, what: str) -> T:
    """Return or raise what ``call`` does, unless it takes longer than ``seconds``.

    Raises:
        UnavailableError: The time is up.
    """
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done or task.cancelled():  # as calls of a closed client are
        task.cancel()
        raise UnavailableError(f"Modal did not answer within {seconds:g} s ({what})")
    return task.result()


async def asked(call: Awaitable[T], seconds: float, what: str) -> T:
    """Do the same as :func:`bounded`, but with Modal's errors translated into the protocol's.

    Raises:
        BackendError: Modal could not be asked, or refused.
    """
    try:
        return await bounded(call, seconds, what)
    except BackendError:
        raise
    except Exception as error:  # noqa: BLE001 - raised as an error of diloco
        raise meant(error, what) from shown_cause(error)


def ask(call: Callable[[], Awaitable[T]], seconds: float, what: str) -> T:
    """Do the same as :func:`asked`; may also be called while an event loop is running.

    Raises:
        BackendError: Modal could not be asked, or refused.
    """

    async def made() -> T:
        return await call()  # the call itself may also raise at once

    async def run() -> T:
        return await asked(made(), seconds, what)

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # there is no running loop
        return _run(run)
    with ThreadPoolExecutor(1, thread_name_prefix="diloco-modal") as pool:
        return pool.submit(_run, run).result()


async def patiently(
    call: Callable[[], Coroutine[Any, Any, T]], backoff: Backoff, timeout: float
) -> T:
    """Repeat a call until it returns, as :func:`diloco_protocol.retry` does.

    Pauses are made in a separate thread.

    Raises:
        BackendError: An error that is not worth another try, or the last error.
    """
    try:
        return await call()
    except BackendError as error:
        if not error.retryable:
            raise
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        None, lambda: retry(lambda: _run(call), backoff, timeout=timeout)
    )
