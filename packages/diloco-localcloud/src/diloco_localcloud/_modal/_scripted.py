"""Calls and a clock that a test moves."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

from .._server._timeline import Clock
from ._hands import HeldCall, HeldWorkspace
from ._workspace._call import Call, Payload, Result, Status
from ._workspace._habits import new_id
from ._workspace._workspace import Workspace

# A container sends more than this as a blob.
_MOST_BYTES = 2 << 20


class ScriptedCall(HeldCall):
    """A call that a test moves.

    An action that does not fit the call's state (a start after the end) does nothing.

    Thread-safe.
    """

    def start(self) -> None:
        """Give the call a container, in which its function is called."""
        with self._workspace.lock:
            self._workspace.calls.start(self._call)

    def end(self, value: Any = None) -> None:
        """Make its function return a value, which must be one that can be pickled."""
        payload = Payload(pickle.dumps(value, 4))
        if len(payload.data) > _MOST_BYTES:
            with self._workspace.lock:
                blob_id = new_id("bl")
                self._workspace.blobs[blob_id] = payload.data
            payload = Payload(blob=blob_id)
        self._finish(Result(Status.SUCCESS, payload))

    def fail(self, exception: BaseException) -> None:
        """Make its function raise an exception."""
        payload = Payload(pickle.dumps(exception, 4))
        self._finish(Result(Status.FAILURE, payload, repr(exception)))

    def exit(self, code: int = 1) -> None:
        """Make its function call ``sys.exit``."""
        self.fail(SystemExit(code))

    def crash(self, message: str = "Runner failed with exit code: 137") -> None:
        """End its container without a result."""
        self._finish(Result(Status.FAILURE, message=message))

    def oom(self, message: str = "Runner was terminated because it ran out of memory") -> None:
        """Kill its container because it has used up its memory."""
        self._finish(Result(Status.KERNEL_OOM_KILL, message=message))

    def break_down(self, message: str = "Internal error in the scheduler") -> None:
        """Fail the call with an internal failure of Modal's, whether it runs or not."""
        with self._workspace.lock:
            result = Result(Status.INTERNAL_FAILURE, message=message)
            self._workspace.calls.finish(self._call, result)

    def log(self, text: str | bytes, source: str = "stdout") -> None:
        """Write lines to its log, now.

        Args:
            text: one or more lines; bytes that are not UTF-8 are replaced, as Modal's protocol has
                only text.
            source: ``stdout``, ``stderr`` or ``system``.
        """
        with self._workspace.lock:
            task = self._call.lives[-1].task_id if self._call.lives else ""
            now = self._workspace.timeline.now()
            words = text if isinstance(text, str) else text.decode(errors="replace")
            self._workspace.logs.write(now, self._call, task, words, source)
            self._workspace.changed()

    def on_interrupt(self, after: float = 1.0, then: Callable[[], None] | None = None) -> None:
        """Set what its program does in this container when it is told to end.

        Args:
            after: seconds that it takes to end; it is killed after ``habits.grace_seconds`` if it
                was preempted or overdue.
            then: a last action, such as a write to a Dict. It is called before the container is
                gone, if the program is not killed.
        """
        with self._workspace.lock:
            self._call.interrupt_seconds, self._call.last_words = after, then

    def ignore_interrupt(self) -> None:
        """Make its program ignore all interruptions."""
        self.on_interrupt(float("inf"))

    def _finish(self, result: Result) -> None:
        with self._workspace.lock:
            if self._call.life is not None:
                self._workspace.calls.finish(self._call, result)


class ModalWorld(HeldWorkspace[ScriptedCall], Clock):
    """The calls and the clock of a stand-in, as a test moves them; thread-safe.

    In real time the clock cannot be moved: ``advance``, ``settle`` and ``step`` raise ValueError.
    """

    def __init__(self, workspace: Workspace) -> None:
        HeldWorkspace.__init__(self, workspace)
        Clock.__init__(self, workspace.timeline, workspace.lock)

    def _hold(self, call: Call) -> ScriptedCall:
        return ScriptedCall(self._workspace, call)

    def deploy(
        self,
        app: str = "app",
        functions: Iterable[str] = ("function",),
        *,
        environment: str = "",
        timeout: float = 300.0,
        gpu: str = "",
    ) -> None:
        """Deploy an app with functions of these names, without a client.

        Raises:
            ValueError: there is no such environment.
        """
        with self._workspace.lock:
            place = self._environment(environment)
            made = self._workspace.deployed(place, app)
            made = made or self._workspace.create_app(place, app, app)
            for name in functions:
                function = self._workspace.create_function(made, name)
                function.timeout, function.gpu = timeout, gpu
                function.gpu_count = 1 if gpu else 0
            ids = {name: item.function_id for name, item in made.functions.items()}
            self._workspace.publish(made, app, ids, "DEPLOYED")
