"""The calls and the clock that a test moves."""

from __future__ import annotations

from collections.abc import Iterable

from ..._server._clock import Clock
from .._hands._world import HeldWorkspace
from .._workspace._call import Call
from .._workspace._workspace import Workspace
from ._call import ScriptedCall


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
