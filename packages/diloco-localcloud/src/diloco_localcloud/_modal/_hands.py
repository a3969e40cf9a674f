"""The workspace, calls and Dicts as a test handles them, whether calls are scripted or run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from ._workspace._call import PICKLE, Call
from ._workspace._habits import ModalHabits
from ._workspace._workspace import Workspace

_OPTIONS = "timeout gpu gpu_count cpu memory memory_limit cloud max_containers"


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
            function, secrets = self._call.function, self._workspace.secrets
            options = {name: getattr(function, name) for name in _OPTIONS.split()}
            names = [secrets[key].name for key in function.secret_ids if key in secrets]
            return {**options, "regions": list(function.regions), "secrets": names}

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


class ScriptedDict:
    """A Dict, with the same entries that programs in containers and all clients see.

    The values are unpickled here, so their writer can run code in the test. Thread-safe.
    """

    def __init__(self, workspace: Workspace, dict_id: str) -> None:
        self._workspace = workspace
        self._id = dict_id

    def put(self, key: Any, value: Any, *, skip_if_exists: bool = False) -> bool:
        """Write an entry; return False if ``skip_if_exists`` keeps an older one."""
        data = pickle.dumps(value, 4)
        with self._workspace.lock:
            written = self._workspace.dicts.put(
                self._id, pickle.dumps(key, 4), data, if_not_exists=skip_if_exists
            )
            self._workspace.changed()
            return written

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key; the default if there is none."""
        with self._workspace.lock:
            data = self._workspace.dicts.get(self._id, pickle.dumps(key, 4))
        return default if data is None else pickle.loads(data)

    def pop(self, key: Any) -> Any:
        """Take an entry out and return its value; None if there is none."""
        with self._workspace.lock:
            entry = self._workspace.dicts.entries(self._id).pop(pickle.dumps(key, 4), None)
        return None if entry is None else pickle.loads(entry.value)

    def items(self) -> dict[Any, Any]:
        """Return all entries, in the order in which they were first written."""
        with self._workspace.lock:
            entries = self._workspace.dicts.contents(self._id)
        return {pickle.loads(key): pickle.loads(value) for key, value in entries}


HeldT = TypeVar("HeldT", bound=HeldCall)


class HeldWorkspace(Generic[HeldT]):
    """A workspace as a test sees and changes it, scripted or real; thread-safe.

    Attributes:
        habits: how Modal behaves: starts, GPUs, rates, how long things are kept.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.habits: ModalHabits = workspace.habits

    def _hold(self, call: Call) -> HeldT:
        raise NotImplementedError

    def now(self) -> float:
        """Return the time of the virtual clock, in seconds since the epoch."""
        with self._workspace.lock:
            return self._workspace.timeline.now()

    def add_environment(self, name: str) -> None:
        """Make an environment; do nothing if there is one of this name."""
        with self._workspace.lock:
            if name not in self._workspace.environments:
                self._workspace.environments.append(name)

    def add_secret(self, name: str, values: Mapping[str, str], *, environment: str = "") -> None:
        """Make a secret, which replaces one of the same name.

        Raises:
            ValueError: there is no such environment.
        """
        with self._workspace.lock:
            self._workspace.create_secret(self._environment(environment), name, values)

    def stop_app(self, name: str, *, environment: str = "") -> None:
        """Stop a deployed app: its calls are cancelled, and it is no longer found.

        Raises:
            ValueError: there is no such environment.
            LookupError: there is no such app in it.
        """
        with self._workspace.lock:
            app = self._workspace.deployed(self._environment(environment), name)
            if app is None:
                raise LookupError(f"no app is deployed as {name!r}")
            self._workspace.stop_app(app)

    def calls(self, function: str = "") -> list[HeldT]:
        """Return the calls of a function, or of all functions, oldest first."""
        with self._workspace.lock:
            calls = self._workspace.calls.all()
            return [self._hold(call) for call in calls if function in ("", call.function.name)]

    def call(self, call_id: str) -> HeldT:
        """Return a call by its ID.

        Raises:
            LookupError: there is no such call.
        """
        with self._workspace.lock:
            calls = {call.call_id: call for call in self._workspace.calls.all()}
            if call_id not in calls:
                raise LookupError(f"there is no call {call_id!r}; there are: {[*calls] or 'none'}")
            return self._hold(calls[call_id])

    def dict(self, name: str, *, environment: str = "") -> ScriptedDict:
        """Return a Dict by its name.

        Raises:
            ValueError: there is no such environment.
            LookupError: there is no such Dict in it.
        """
        with self._workspace.lock:
            place = self._environment(environment)
            listed = self._workspace.dicts.listed(place, 0.0)
            dicts = {item.name: item.dict_id for item in listed}
            if name not in dicts:
                raise LookupError(f"there is no Dict {name!r}; there are: {[*dicts] or 'none'}")
            return ScriptedDict(self._workspace, dicts[name])

    def _environment(self, name: str) -> str:
        environments = self._workspace.environments
        if name and name not in environments:
            raise ValueError(
                f"there is no environment {name!r}; there are: {', '.join(environments)}"
            )
        return name or environments[0]
