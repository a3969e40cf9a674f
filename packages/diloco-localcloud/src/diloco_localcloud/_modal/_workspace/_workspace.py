"""A workspace: environments, apps, secrets, calls, Dicts, logs; and the clock that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..._server._timeline import Timeline
from ._app import App, Function
from ._calls import Calls
from ._dicts import Dicts
from ._habits import ModalHabits, new_id
from ._logs import Logs
from ._refused import RefusedError, not_found

DEFAULT_ENVIRONMENT = "main"


@dataclass(frozen=True)
class Secret:
    """A secret: its ID, ``st-…``, and the variables that it holds."""

    secret_id: str
    name: str
    environment: str
    values: Mapping[str, str]
    created: float


class Workspace:
    """The objects of a workspace, and its clock.

    Attributes:
        lock: guards everything; notified when something is planned or has changed.
        timeline: the clock.
        habits: how the workspace behaves.
        name: its name.
        environments: their names; the first one is the default.
        apps: the apps by ID, oldest first.
        functions: the functions by ID, including those with bound options.
        secrets: the secrets by ID.
        calls: the calls of functions.
        dicts: the Dicts.
        logs: the output of containers.
        blobs: arguments and results that are too large for a message, by ID.
        files: the files that were uploaded for mounts, by SHA-256.
        mounts: by ID, the files of a mount: their paths in a container, and their SHA-256.
        containers: the ID of each container, by the secret that it sends with its requests.
        listeners: called under the lock after every change.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.lock = threading.Condition()
        self.timeline = timeline
        self.name = "stand-in"
        self.habits = ModalHabits()
        self.environments = [DEFAULT_ENVIRONMENT]
        self.apps: dict[str, App] = {}
        self.functions: dict[str, Function] = {}
        self.secrets: dict[str, Secret] = {}
        self.dicts = Dicts(timeline.now, self.habits)
        self.logs = Logs()
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.mounts: dict[str, list[tuple[str, str]]] = {}
        self.containers: dict[str, str] = {}
        self.listeners: list[Callable[[], None]] = []
        self.calls = Calls(timeline, self.habits, self.changed)

    def changed(self) -> None:
        """Wake every thread that waits for a change, and call the listeners."""
        self.lock.notify_all()
        for listener in self.listeners:
            listener()

    def environment(self, name: str) -> str:
        """Return the environment of a name; the default one for an empty name.

        Raises:
            RefusedError: there is no such environment.
        """
        if name and name not in self.environments:
            raise not_found(f"Environment '{name}' not found")
        return name or self.environments[0]

    def app(self, app_id: str) -> App:
        """Return an app by its ID.

        Raises:
            RefusedError: there is no such app.
        """
        if app_id not in self.apps:
            raise not_found(f"App with ID '{app_id}' not found")
        return self.apps[app_id]

    def deployed(self, environment: str, name: str) -> App | None:
        """Return the app that is deployed under a name; None if there is none."""
        apps = (app for app in self.apps.values() if app.name == name and not app.stopped)
        return next((app for app in apps if app.environment == environment), None)

    def create_app(self, environment: str, description: str, name: str = "") -> App:
        """Return a new app without functions."""
        made = App(new_id("ap"), description, environment, self.timeline.now(), name=name)
        self.apps[made.app_id] = made
        return made

    def stop_app(self, app: App) -> None:
        """Stop an app: its calls are cancelled, and it can no longer be found."""
        if app.stopped is None:
            app.state, app.stopped = "STOPPED", self.timeline.now()
            for call in self.calls.of(app):
                self.calls.cancel(call, terminate=True)
            self.changed()

    def create_function(self, app: App, name: str) -> Function:
        """Return the function of a name in an app, a new one if there is none."""
        if name not in app.functions:
            made = Function(new_id("fu"), app, name, definition_id=new_id("de"))
            app.functions[name] = self.functions[made.function_id] = made
        return app.functions[name]

    def publish(self, app: App, name: str, functions: Mapping[str, str], state: str) -> None:
        """Let functions be found, by a deployment's name or within an app that runs for a while."""
        app.name, app.state = name, state
        app.published = dict(functions)
        app.version += 1
        self.changed()

    def function(self, function_id: str) -> Function:
        """Return a function by its ID.

        Raises:
            RefusedError: there is no such function.
        """
        if function_id not in self.functions:
            raise not_found(f"Function with ID '{function_id}' not found")
        return self.functions[function_id]

    def find_function(self, environment: str, app_name: str, name: str) -> Function:
        """Return a function of a deployed app.

        Raises:
            RefusedError: there is no such app, or it has no such function.
        """
        app = self.deployed(environment, app_name)
        if app is None:
            raise not_found(f"App '{app_name}' not found in environment '{environment}'")
        if name not in app.published:
            raise not_found(f"App '{app_name}' has no function '{name}'")
        return self.function(app.published[name])

    def check_gpu(self, gpu: str) -> None:
        """Refuse an unknown type of GPU.

        Raises:
            RefusedError: there is no such type.
        """
        if gpu and gpu.upper() not in {"ANY", *self.habits.gpus}:
            words = f"expected one of: {', '.join(sorted(self.habits.gpus))}"
            raise RefusedError("INVALID_ARGUMENT", f"Unknown GPU type '{gpu}', {words}")

    def create_secret(self, environment: str, name: str, values: Mapping[str, str]) -> Secret:
        """Return a new secret, which replaces one of the same name."""
        for secret in list(self.secrets.values()):
            if name and (secret.name, secret.environment) == (name, environment):
                del self.secrets[secret.secret_id]
        made = Secret(new_id("st"), name, environment, dict(values), self.timeline.now())
        self.secrets[made.secret_id] = made
        return made

    def find_secret(self, environment: str, name: str) -> Secret | None:
        """Return the secret of a name; None if there is none."""
        matches = (secret for secret in self.secrets.values() if name and secret.name == name)
        return next((secret for secret in matches if secret.environment == environment), None)
