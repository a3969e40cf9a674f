"""The calls and the clock that a test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._hands._world import HeldWorkspace
from ._call import ScriptedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..._server._timeline import Timeline
    from .._workspace._call import Call


class ModalWorld(HeldWorkspace[ScriptedCall]):
    """The calls and the clock of a stand-in, as a test moves them; thread-safe.

    In real time the clock cannot be moved: ``advance``, ``settle`` and ``step`` raise ValueError.
    """

    def _hold(self, call: Call) -> ScriptedCall:
        return ScriptedCall(self._workspace, call)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and do whatever falls due meanwhile."""
        with self._workspace.lock:
            timeline = self._virtual()
            timeline.run_until(timeline.now() + seconds)

    def settle(self, within: float = 2.0, most: float = 600.0) -> None:
        """Let time pass until nothing is due within the next ``within`` seconds.

        At most ``most`` seconds pass in all.
        """
        with self._workspace.lock:
            timeline = self._virtual()
            end = timeline.now() + most
            while (due := timeline.next_due()) is not None and due <= min(
                timeline.now() + within, end
            ):
                timeline.run_until(due)

    def step(self) -> bool:
        """Do the next thing that is due, however late; return False if nothing is due at all."""
        with self._workspace.lock:
            return self._virtual().step()

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

    def on_start(self, program: Callable[[ScriptedCall], None] | None) -> None:
        """Set a function that is called whenever a container starts, to act as its program.

        None removes it.
        """

        def run(call: Call) -> None:
            assert program is not None
            program(ScriptedCall(self._workspace, call))

        with self._workspace.lock:
            self._workspace.calls.on_start = None if program is None else run

    def _virtual(self) -> Timeline:
        if not self._workspace.timeline.virtual:
            raise ValueError("the stand-in was made with real_time=True: its clock cannot be moved")
        return self._workspace.timeline
