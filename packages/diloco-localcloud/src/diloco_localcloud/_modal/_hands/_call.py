"""The views of any call, and the actions on it from outside."""

from __future__ import annotations

import pickle
from typing import Any

from .._workspace._call import PICKLE, Call
from .._workspace._workspace import Workspace


class HeldCall:
    """A call, scripted or run by a process. Thread-safe."""

    def __init__(self, workspace: Workspace, call: Call) -> None:
        self._workspace = workspace
        self._call = call

    @property
    def call_id(self) -> str:
        """Return ``fc-…``; in its container, ``modal.current_function_call_id()``."""
        return self._call.call_id

    @property
    def app(self) -> str:
        """Return the name of the app; its description if it is not deployed."""
        app = self._call.function.app
        return app.name or app.description

    @property
    def function(self) -> str:
        """Return the name of the function."""
        return self._call.function.name

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that it runs with.

        ``timeout`` (seconds), ``gpu``, ``gpu_count``, ``cpu`` (cores), ``memory`` and
        ``memory_limit`` (MiB), ``regions``, ``cloud``, ``max_containers`` and
        ``secrets`` (names). An option that was not asked for is 0 or empty.
        """
        with self._workspace.lock:
            function = self._call.function
            secrets = self._workspace.secrets
            return {
                "timeout": function.timeout,
                "gpu": function.gpu,
                "gpu_count": function.gpu_count,
                "cpu": function.cpu,
                "memory": function.memory,
                "memory_limit": function.memory_limit,
                "regions": list(function.regions),
                "cloud": function.cloud,
                "max_containers": function.max_containers,
                "secrets": [secrets[key].name for key in function.secret_ids if key in secrets],
            }

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that were passed, positional and by name.

        They are unpickled here, so their sender can run code in the test.

        Raises:
            ValueError: they are not pickled.
        """
        payload = self._call.payload
        if payload.form != PICKLE:
            raise ValueError(f"the arguments of {self.call_id} are not pickled")
        with self._workspace.lock:
            data = self._workspace.blobs[payload.blob] if payload.blob else payload.data
        args, kwargs = pickle.loads(data)
        return args, kwargs

    @property
    def status(self) -> str:
        """Return ``pending``, ``running``, or how it has ended.

        The ends are ``success``, ``failure``, ``terminated``, ``timeout``, ``init_failure``,
        ``internal_failure`` and ``kernel_oom_kill``.
        """
        with self._workspace.lock:
            return self._call.status

    @property
    def attempt(self) -> int:
        """Return how many containers it has had; 0 before its first start."""
        with self._workspace.lock:
            return len(self._call.lives)

    @property
    def has_container(self) -> bool:
        """Return whether a container runs it; one may, for a while, after the call has ended."""
        with self._workspace.lock:
            return self._call.life is not None

    @property
    def interrupted(self) -> bool:
        """Return whether its program was told to end and still runs."""
        with self._workspace.lock:
            return self._call.life is not None and self._call.life.interrupted is not None

    def preempt(self) -> None:
        """Take its container away: SIGINT, a grace, then the same input again in another one."""
        with self._workspace.lock:
            self._workspace.calls.interrupt(self._call)

    def stop(self, *, terminate_containers: bool = True) -> None:
        """Cancel it as a user with the dashboard does; do nothing if it has ended."""
        with self._workspace.lock:
            self._workspace.calls.cancel(self._call, terminate=terminate_containers)
