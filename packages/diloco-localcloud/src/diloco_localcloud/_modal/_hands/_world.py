"""A workspace that a test reads and changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from .._workspace._call import Call
from .._workspace._habits import ModalHabits
from .._workspace._workspace import Workspace
from ._call import HeldCall
from ._dict import ScriptedDict

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
            kept = self._workspace.calls.all()
            kept = [call for call in kept if not function or call.function.name == function]
            return [self._hold(call) for call in kept]

    def call(self, call_id: str) -> HeldT:
        """Return a call by its ID.

        Raises:
            LookupError: there is no such call.
        """
        with self._workspace.lock:
            for call in self._workspace.calls.all():
                if call.call_id == call_id:
                    return self._hold(call)
            ids = ", ".join(call.call_id for call in self._workspace.calls.all()) or "none"
            raise LookupError(f"there is no call {call_id!r}; there are: {ids}")

    def dict(self, name: str, *, environment: str = "") -> ScriptedDict:
        """Return a Dict by its name.

        Raises:
            ValueError: there is no such environment.
            LookupError: there is no such Dict in it.
        """
        with self._workspace.lock:
            place = self._environment(environment)
            modal_dict = self._workspace.dicts.named(place, name)
            if modal_dict is None:
                names = ", ".join(item.name for item in self._workspace.dicts.listed(place, 0.0))
                raise LookupError(f"there is no Dict {name!r}; there are: {names or 'none'}")
            return ScriptedDict(self._workspace, modal_dict.dict_id)

    def _environment(self, name: str) -> str:
        environments = self._workspace.environments
        if name and name not in environments:
            raise ValueError(
                f"there is no environment {name!r}; there are: {', '.join(environments)}"
            )
        return name or environments[0]
