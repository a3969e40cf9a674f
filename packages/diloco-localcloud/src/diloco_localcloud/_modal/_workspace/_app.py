"""Apps and their functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Function:
    """A function, or one with options bound to it.

    Attributes:
        function_id: ``fu-…``.
        app: the app to which it belongs.
        name: its name within the app.
        timeout: seconds that a container may take for one input.
        gpu: the type of its GPUs, such as ``H100``; empty for none.
        gpu_count: the number of its GPUs.
        cpu: the cores that it asks for; 0 for Modal's default.
        memory: the MiB that it asks for; 0 for Modal's default.
        memory_limit: MiB; 0 for no limit.
        regions: the regions in which it may run; none for everywhere.
        cloud: the cloud in which it has to run; empty for any.
        max_containers: how many there may be at a time; 0 for no limit.
        secret_ids: the secrets in its environment.
        definition: the message that defined it, for code that speaks the protocol.
        options: the message that bound options to it, also for code that speaks the protocol.
        definition_id: a new one with each deploy.
        base: the function without the options.
    """

    function_id: str
    app: App
    name: str
    timeout: float = 300.0
    gpu: str = ""
    gpu_count: int = 0
    cpu: float = 0.0
    memory: int = 0
    memory_limit: int = 0
    regions: tuple[str, ...] = ()
    cloud: str = ""
    max_containers: int = 0
    secret_ids: tuple[str, ...] = ()
    definition: Any = None
    options: Any = None
    definition_id: str = ""
    base: Function | None = None


@dataclass
class App:
    """An app.

    Attributes:
        app_id: ``ap-…``.
        description: its name in lists.
        environment: the environment to which it belongs.
        created: when it was created, in seconds since the epoch.
        name: the name under which it is deployed; empty if it is not.
        state: its state.
        functions: its functions by name, published or not.
        published: the IDs of the functions that can be looked up, by name.
        version: how many times it was deployed.
        stopped: when it was stopped; None if it was not.
    """

    app_id: str
    description: str
    environment: str
    created: float
    name: str = ""
    state: str = "INITIALIZING"
    functions: dict[str, Function] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    version: int = 0
    stopped: float | None = None
