"""Call an executor under watch: a call that hangs or raises a wrong error breaks a promise."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TypeVar

from _pytest.outcomes import OutcomeException

from diloco_protocol import BackendError

from ._blame import is_of_the_world, raised_at
from ._promises import HarnessFault, PromiseBroken
from ._time import Overslept

if TYPE_CHECKING:
    from diloco_protocol import BaseExecutor, Capabilities

    from ._harness import Harness
    from ._model import Run

T = TypeVar("T")

PIECE = 0.05
"""Real seconds between two looks at a call that has not come back."""
LONGEST = 3
"""The longest that one call may sleep where time is virtual, in units of ``Harness.timeout``."""


class Calls:
    """The base of everything that judges: a world, an executor, a history, and watched calls."""

    harness: Harness
    executor: BaseExecutor
    capabilities: Capabilities
    runs: list[Run]
    history: list[str]
    last: str
    disturbed: bool
    hung: bool

    def broken(self, promise: str, said: str, true: str) -> NoReturn:
        """Raise that a promise is broken."""
        raise PromiseBroken(promise, said, true, self.history)

    @contextlib.contextmanager
    def part_of(self, promise: str) -> Iterator[None]:
        """Report what is broken meanwhile as this promise, since it was tried for its sake only."""
        try:
            yield
        except PromiseBroken as error:
            self.broken(promise, error.said, f"{error.true} ({error.promise})")

    def within(self, promise: str, call: Callable[[], T]) -> T:
        """Return what a call of the executor returns, or raise what it raises.

        A call that hangs, or raises anything but a BackendError, breaks the promise.
        """
        done: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                done.append(call())
            # Raised again below, in the thread of the test
            except BaseException as error:  # noqa: BLE001
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        with self._time_limit() as is_own:
            thread.start()
            back = self._wait(thread)
        late = "R2" if promise == "R6" else promise
        if not back:
            self.hung = True
            interrupt(thread)
            self.broken(late, f"nothing, for {self.harness.patience:g} s", "every call comes back")
        if not raised:
            return done[0]
        error = raised[0]
        if isinstance(error, Overslept):
            self.hung |= is_own
            self.broken(late, "nothing yet", str(error))
        if not isinstance(error, (BackendError, AssertionError, HarnessFault, OutcomeException)):
            text = f"{type(error).__name__}: {error} ({raised_at(error)})"
            if is_of_the_world(self.harness, error):
                raise HarnessFault(
                    f"while the executor was called, the world itself raised {text}. It must "
                    "answer what its platform would"
                ) from error
            self.broken(promise, text, "every error of a verb is a BackendError")
        raise error

    def verb(self, promise: str, call: Callable[[], T]) -> T:
        """Call a verb; while the backend is well, an error breaks the promise.

        Raises:
            BackendError: The backend is disturbed.
        """
        try:
            return self.within(promise, call)
        except BackendError as error:
            if self.disturbed:
                raise
            self.broken(promise, f"it raised {error!r}", "the backend is well, and this is allowed")

    def _wait(self, thread: threading.Thread) -> bool:
        """Say whether a thread has ended in time."""
        # Waits in short pieces, so that a while in which this whole process stands still counts as
        # one piece.
        for _ in range(math.ceil(self.harness.patience / PIECE)):
            thread.join(PIECE)
            if not thread.is_alive():
                return True
        return False

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[bool]:
        """Limit how long a call sleeps where time is virtual; yield whether this set the limit."""
        time = self.harness.time
        if time.limit is not None:
            yield False  # collect has set one
            return
        time.limit = self.harness.clock() + LONGEST * self.harness.timeout
        try:
            yield True
        finally:
            time.limit = None


class Interrupted(BaseException):
    """The exception raised in a call that has not come back, so that it delays nothing after it."""


def interrupt(thread: threading.Thread) -> None:
    """End a thread at its next step in Python; one that waits in C goes on, and costs no time."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted)
    )
