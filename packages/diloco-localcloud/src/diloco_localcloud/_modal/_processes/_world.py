"""The calls that run as processes, for a test to act on."""

from __future__ import annotations

import time
from collections.abc import Callable

from .._hands._call import HeldCall
from .._hands._world import HeldWorkspace
from .._workspace._call import Call
from .._workspace._workspace import Workspace
from ._runner import Runner


class LocalCall(HeldCall):
    """A call whose container is a process of this machine.

    An action that does not fit its state does nothing. Thread-safe.
    """

    def __init__(self, workspace: Workspace, call: Call, runner: Runner) -> None:
        super().__init__(workspace, call)
        self._runner = runner

    @property
    def pid(self) -> int | None:
        """Return the PID of its container's first process; None if no container of it runs."""
        with self._workspace.lock:
            life = self._call.life
            return None if life is None else self._runner.pid(life.task_id)

    def kill(self) -> None:
        """Kill its container with all its processes, from outside: it leaves no result."""
        with self._workspace.lock:
            if self._call.life is not None:
                self._runner.kill(self._call.life.task_id)


class LocalCalls(HeldWorkspace[LocalCall]):
    """The calls that run as processes, and the objects that they use; thread-safe."""

    def __init__(self, workspace: Workspace, runner: Runner) -> None:
        super().__init__(workspace)
        self._runner = runner

    def _hold(self, call: Call) -> LocalCall:
        return LocalCall(self._workspace, call, self._runner)

    def wait_for(self, predicate: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait until ``predicate()`` is true; it is called after every change.

        Raises:
            TimeoutError: it is not true after so many seconds.
        """
        end = time.monotonic() + seconds
        with self._workspace.lock:
            while not predicate():
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"what was waited for has not come in {seconds:g} s")
                self._workspace.lock.wait(left)
