"""The calls of functions, and what happens to them over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..._server._timeline import Timeline
from ._app import App, Function
from ._call import Call, Life, Payload, Result, Status
from ._habits import ModalHabits, new_id
from ._refused import not_found


class Program(Protocol):
    """The part that runs calls as processes.

    Without one, a test decides how calls run. Called under the lock of the workspace.
    """

    def start(self, call: Call, life: Life) -> None:
        """Run a call; call ``Calls.gone`` when no process of it is left."""

    def interrupt(self, call: Call, life: Life) -> None:
        """Send a call's processes SIGINT, and SIGKILL after the grace."""


class Calls:
    """The calls of a workspace; its owner calls it under a lock.

    A result is visible at once; the container in which a call runs may live on for a while.

    Attributes:
        program: the part that runs them as processes; None if they are scripted.
    """

    def __init__(
        self,
        timeline: Timeline,
        habits: ModalHabits,
        changed: Callable[[], None],
    ) -> None:
        self._timeline = timeline
        self._habits = habits
        self._changed = changed
        self._calls: dict[str, Call] = {}
        self._answered: dict[str, Call] = {}
        self.program: Program | None = None

    def all(self) -> list[Call]:
        """Return every call, oldest first."""
        return list(self._calls.values())

    def of(self, app: App) -> list[Call]:
        """Return the calls of an app, oldest first."""
        return [call for call in self._calls.values() if call.function.app is app]

    def by_id(self, call_id: str) -> Call:
        """Return a call by its ID.

        Raises:
            RefusedError: there is no such call.
        """
        if call_id not in self._calls:
            raise not_found(f"FunctionCall with ID '{call_id}' not found")
        return self._calls[call_id]

    def spawn(self, function: Function, payload: Payload, key: str = "") -> Call:
        """Return a new call, which waits for a container.

        A call that was asked for with the same idempotency key is returned again, and nothing is
        called a second time.
        """
        if key and key in self._answered:
            return self._answered[key]
        call = Call(new_id("fc"), new_id("in"), function, payload, self._timeline.now())
        self._calls[call.call_id] = call
        if key:
            self._answered[key] = call
        self.wait(call)
        self._changed()
        return call

    def wait(self, call: Call) -> None:
        """Plan a container for a call, if calls start by themselves (``auto_start``)."""
        if self._habits.auto_start is not None:
            self._timeline.after(self._habits.auto_start, lambda: self._start_if_room(call))

    def room(self, function: Function) -> bool:
        """Return whether one more container of a function may run."""
        running = sum(call.life is not None and call.function is function for call in self.all())
        return not function.max_containers or running < function.max_containers

    def start(self, call: Call) -> None:
        """Start a container for a call; do nothing if it has one already, or has ended."""
        if call.result is not None or call.life is not None:
            return
        now = self._timeline.now()
        life = Life(new_id("ta"), now)
        call.lives.append(life)
        call.interrupt_seconds, call.last_words = None, None
        if self.program is not None:
            self.program.start(call, life)
        else:
            self.fetch(call, life)
        self._changed()

    def fetch(self, call: Call, life: Life) -> None:
        """Give the program its input; the timeout of the function begins now."""
        life.fetched = True
        self._timeline.after(call.function.timeout, lambda: self._overdue(call, life))
        self._changed()

    def by_task(self, task_id: str) -> tuple[Call, Life] | None:
        """Return the call that runs in a container, and its life; None if the container is gone."""
        for call in self._calls.values():
            if call.life is not None and call.life.task_id == task_id:
                return call, call.life
        return None

    def finish(self, call: Call, result: Result) -> None:
        """End a call with this result, unless it had one before.

        Without a program, its container is gone then.
        """
        self._decide(call, result)
        if self.program is None:
            self._end_life(call)
        self._changed()

    def gone(self, call: Call, life: Life, result: Result) -> None:
        """Record that a container is gone.

        ``result`` becomes the call's if it has none and its container was not told to end.
        """
        life.ended = self._timeline.now()
        if call.result is None:
            if life.interrupted is not None:
                self.wait(call)
            else:
                self.finish(call, result)
        self._changed()

    def interrupt(self, call: Call) -> None:
        """Take its container away: SIGINT, a grace, then the same input again in another one."""
        life = call.life
        if life is None or life.interrupted is not None:
            return
        self._stop_program(call, kill=True)
        self._changed()

    def cancel(self, call: Call, *, terminate: bool) -> None:
        """Cancel a call as FunctionCallCancel does: TERMINATED at once, and the container later.

        Args:
            call: the call; nothing happens if it has ended.
            terminate: send SIGINT, and SIGKILL after the grace; otherwise only raise an exception
                in the program.
        """
        if call.result is not None:
            return
        self._decide(call, Result(Status.TERMINATED))
        self._stop_program(call, kill=terminate)
        self._changed()

    def expired(self, call: Call) -> bool:
        """Return whether its output is no longer kept."""
        kept = self._habits.retention_seconds
        return call.ended is not None and call.ended + kept <= self._timeline.now()

    # -- events that come without a call
    # ------------------------------------------------------------------------------------------

    def _start_if_room(self, call: Call) -> None:
        if self.room(call.function):
            self.start(call)
        elif call.result is None and call.life is None:
            self._timeline.after(1.0, lambda: self._start_if_room(call))

    def _overdue(self, call: Call, life: Life) -> None:
        if call.life is not life:
            return
        if call.result is None:
            text = (
                f"Task's current input {call.input_id} hit its timeout "
                f"of {call.function.timeout:g}s"
            )
            self._decide(call, Result(Status.TIMEOUT, message=text))
        self._stop_program(call, kill=True)
        self._changed()

    def _stop_program(self, call: Call, *, kill: bool) -> None:
        life = call.life
        if life is None:
            return
        first = life.interrupted is None
        if first:
            life.interrupted = self._timeline.now()
        if self.program is not None:
            if not kill:
                life.cancelled = True
            elif first:
                self.program.interrupt(call, life)
            return
        seconds = call.interrupt_seconds
        if seconds is None:
            seconds = self._habits.interrupt_seconds
        if kill:
            seconds = min(seconds, self._habits.grace_seconds)
        if seconds < float("inf"):
            self._timeline.after(seconds, lambda: self._interrupted(call, life))

    def _interrupted(self, call: Call, life: Life) -> None:
        if call.life is not life:
            return
        if call.last_words is not None and call.interrupt_seconds != float("inf"):
            call.last_words()
        self._end_life(call)
        if call.result is None:
            self.wait(call)
        self._changed()

    def _decide(self, call: Call, result: Result) -> None:
        if call.result is None:
            call.result, call.ended = result, self._timeline.now()

    def _end_life(self, call: Call) -> None:
        if call.life is not None:
            call.life.ended = self._timeline.now()
