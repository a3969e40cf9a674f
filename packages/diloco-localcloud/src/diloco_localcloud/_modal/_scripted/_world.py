"""The calls and the clock in the hands of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._call import ScriptedCall
from ._dict import ScriptedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..._server._timeline import Timeline
    from .._workspace._call import Call
    from .._workspace._habits import ModalHabits
    from .._workspace._workspace import Workspace


class ModalWorld:
    """What a test moves; thread-safe.

    In real time nobody moves the clock: ``advance``, ``settle`` and ``step`` raise ValueError.

    Attributes:
        habits: how Modal behaves: starts, GPUs, rates, how long things are kept.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.habits: ModalHabits = workspace.habits

    def now(self) -> float:
        """Seconds since the epoch, on the virtual clock."""
        with self._workspace.lock:
            return self._workspace.timeline.now()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and happen what is due in them."""
        with self._workspace.lock:
            timeline = self._virtual()
            timeline.run_until(timeline.now() + seconds)

    def settle(self, within: float = 2.0, most: float = 600.0) -> None:
        """Let time pass until nothing is due within the next ``within`` seconds, at most ``most`` seconds in all."""
        with self._workspace.lock:
            timeline = self._virtual()
            end = timeline.now() + most
            while (due := timeline.next_due()) is not None and due <= min(
                timeline.now() + within, end
            ):
                timeline.run_until(due)

    def step(self) -> bool:
        """Let the next due thing happen, whenever it is; False if nothing is due at all."""
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
        """Have an app be deployed with functions of these names, without a client that does it.

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
            ids = {name: each.function_id for name, each in made.functions.items()}
            self._workspace.publish(made, app, ids, "DEPLOYED")

    def add_environment(self, name: str) -> None:
        """Make an environment; nothing if there is one of this name."""
        with self._workspace.lock:
            if name not in self._workspace.environments:
                self._workspace.environments.append(name)

    def add_secret(self, name: str, values: Mapping[str, str], *, environment: str = "") -> None:
        """Make a secret; one of the same name goes.

        Raises:
            ValueError: there is no such environment.
        """
        with self._workspace.lock:
            self._workspace.create_secret(self._environment(environment), name, values)

    def calls(self, function: str = "") -> list[ScriptedCall]:
        """The calls of a function, or of all, oldest first."""
        with self._workspace.lock:
            kept = self._workspace.calls.all()
            kept = [call for call in kept if not function or call.function.name == function]
            return [ScriptedCall(self._workspace, call) for call in kept]

    def call(self, call_id: str) -> ScriptedCall:
        """A call by its id.

        Raises:
            LookupError: there is none.
        """
        with self._workspace.lock:
            for call in self._workspace.calls.all():
                if call.call_id == call_id:
                    return ScriptedCall(self._workspace, call)
            ids = ", ".join(call.call_id for call in self._workspace.calls.all()) or "none"
            raise LookupError(f"there is no call {call_id!r}; there are: {ids}")

    def dict(self, name: str, *, environment: str = "") -> ScriptedDict:
        """A Dict by its name.

        Raises:
            ValueError: there is no such environment.
            LookupError: there is no such Dict in it.
        """
        with self._workspace.lock:
            place = self._environment(environment)
            held = self._workspace.dicts.named(place, name)
            if held is None:
                names = ", ".join(each.name for each in self._workspace.dicts.listed(place, 0.0))
                raise LookupError(f"there is no Dict {name!r}; there are: {names or 'none'}")
            return ScriptedDict(self._workspace, held.dict_id)

    def on_start(self, program: Callable[[ScriptedCall], None] | None) -> None:
        """Have something be called whenever a container starts, to play the program in it; None for nothing."""

        def run(call: Call) -> None:
            assert program is not None
            program(ScriptedCall(self._workspace, call))

        with self._workspace.lock:
            self._workspace.calls.on_start = None if program is None else run

    def _virtual(self) -> Timeline:
        if not self._workspace.timeline.virtual:
            raise ValueError("the stand-in was made with real_time=True: its clock cannot be moved")
        return self._workspace.timeline

    def _environment(self, name: str) -> str:
        environments = self._workspace.environments
        if name and name not in environments:
            raise ValueError(
                f"there is no environment {name!r}; there are: {', '.join(environments)}"
            )
        return name or environments[0]
