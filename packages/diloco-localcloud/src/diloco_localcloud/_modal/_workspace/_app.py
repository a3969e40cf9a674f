"""Apps and their functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Function:
    """A function, or one with options bound to it.

    Attributes:
        function_id: ``fu-…``.
        app: to which it belongs.
        name: within the app.
        timeout: seconds that a container may take for one input.
        gpu: its type, such as ``H100``; empty for none.
        gpu_count: how many.
        cpu: cores that are asked for; 0 for what Modal gives by itself.
        memory: MiB that are asked for; likewise.
        memory_limit: MiB; 0 for no limit.
        regions: in which it may run; none for everywhere.
        cloud: in which it has to run; empty for any.
        max_containers: how many there may be at a time; 0 for no limit.
        retries: how often an input is tried again whose function raises an exception.
        retry_delay: seconds before it is tried again.
        secret_ids: the secrets in its environment.
        definition: the message that defined it, for those that speak the protocol.
        options: the message that bound options to it, likewise.
        definition_id: a new one with each deploy.
        base: without the options.
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
    retries: int = 0
    retry_delay: float = 1.0
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
        description: what lists call it.
        environment: in which it is.
        created: when, in seconds since the epoch.
        name: under which it is deployed; empty if it is not.
        state: of it.
        functions: those that it has, by name, published or not.
        published: the ids of those that can be looked up, by name.
        version: how often it was deployed.
        stopped: when; None if it is not.
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
