"""The request of a launch, which is checked before anything is started, and the resulting plan."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, Unpack

from ._checks import (
    check_amount,
    check_seconds,
    check_text,
    check_texts,
    check_whole,
    has_half_a_pair,
    shown,
)
from ._entrypoint import entrypoint_name
from ._errors import InvalidRequestError
from ._json import canonical, check_json
from ._redact import redacted_repr
from ._resources import parse_gpu
from ._spec import (
    RANK_VARIABLE,
    WORLD_SIZE_VARIABLE,
    ReplicaSpec,
    check_variables,
    is_reserved,
    is_variable_name,
)

MAX_REPLICAS = 10_000
_LONGEST_URI = 2**15
_RUN_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")
_PREFIX_LENGTH = 24  # leaves room for the part that makes a generated name unique


class LaunchOptions(TypedDict, total=False):
    """The keyword arguments of a launch; :meth:`BaseExecutor.launch_replicas` describes them."""

    gpu: str | None
    timeout: float | None
    run_id: str | None
    cpu: str | float | None
    memory: str | None
    env: Mapping[str, str] | None
    secrets: Mapping[str, str] | None
    labels: Mapping[str, str] | None
    spot: bool | None
    max_restarts: int | None
    rank_offset: int
    world_size: int | None
    cohort: str | None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The arguments of one launch: checked, normalised, immutable by convention.

    Attributes:
        run_id: Name of the launch; it is the idempotency key.
        ranks: The ranks to launch, ascending.
        world_size: Number of replicas of the whole run, which may be more than one launch.
        entrypoint: ``"package.module:function"``.
        kwargs: Its keyword arguments, a JSON object.
        cohort: Name that all replicas of the whole run share.
        rendezvous_uri: Where the replicas meet, if the arguments say so.
        rank_env: Name of a variable that will hold the rank.
        world_size_env: Name of a variable that will hold the number of replicas.
        gpu: The GPUs for each replica, such as ``"H100"`` or ``"A100:8"``; None: no GPU.
        timeout: Seconds for which an attempt may run; None for no limit.
        cpu: CPUs for each replica, in the backend's words.
        memory: Memory for each replica, in the backend's words.
        env: Environment variables.
        secrets: References to secrets by variable name; never their values.
        labels: Labels that the platform's records of the run carry.
        spot: Whether interruptible capacity is requested.
        max_restarts: How often a failed attempt is started again.
        named: Whether the caller chose the run_id, and may have launched the same run before. It is
            not among the fields on which two launches must agree: a run whose name was generated
            can be launched again under that name.
        backend: Name of the backend that launches it. Not among those fields either.
        place: Where the backend runs the replicas, as they are told. Not among those fields either,
            since one place may be reached under several names.
    """

    run_id: str
    ranks: tuple[int, ...]
    world_size: int
    entrypoint: str
    kwargs: dict[str, Any]
    cohort: str
    rendezvous_uri: str | None = None
    rank_env: str = RANK_VARIABLE
    world_size_env: str = WORLD_SIZE_VARIABLE
    gpu: str | None = None
    timeout: float | None = 3600.0
    cpu: str | None = None
    memory: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    spot: bool | None = None
    max_restarts: int = 0
    named: bool = field(default=True, compare=False)
    backend: str = field(default="", compare=False)
    place: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return redacted_repr(self)

    def specs(self, *, grace: float = 10.0, restarts: bool | None = None) -> list[ReplicaSpec]:
        """Return the spec of each replica, in rank order.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
            restarts: Whether the backend starts a replica of this launch again in any case: after a
                failure, or when a machine is taken away. None if it cannot tell. Replicas are told
                so only if no other launch has a part of the cohort.
        """
        shared = {
            f.name: getattr(self, f.name) for f in fields(ReplicaSpec) if hasattr(self, f.name)
        }
        if len(self.ranks) < self.world_size:
            restarts = None
        return [
            ReplicaSpec(rank=rank, grace=grace, restarts=restarts, **shared) for rank in self.ranks
        ]

    def fingerprint(self) -> str:
        """Return a digest of all fields on which two launches with the same run_id must agree."""
        import hashlib  # slow to import

        everything = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return hashlib.sha256(canonical(everything).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests that a launch would send, to look at before they are sent.

    Attributes:
        run_id: Name of the run.
        requests: The requests in order, as JSON values. Secrets appear as references; a backend
            redacts everything that looks like a secret.
    """

    run_id: str
    requests: tuple[dict[str, Any], ...]

    def __repr__(self) -> str:
        return redacted_repr(self)


def make_request(
    n_replicas: int,
    entrypoint: str | Callable[..., Any],
    entrypoint_args: Mapping[str, Any] | None,
    *,
    run_prefix: str | None = None,
    **options: Unpack[LaunchOptions],
) -> RunRequest:
    """Check the arguments of a launch; :meth:`BaseExecutor.launch_replicas` describes them.

    Raises:
        InvalidRequestError: An argument is not allowed; the error says what was given and what is
            allowed.
        TypeError: There is no such argument.
    """
    if unknown := options.keys() - LaunchOptions.__annotations__.keys():
        raise TypeError(
            f"a launch has no argument {min(unknown)!r}; it takes "
            f"{', '.join(LaunchOptions.__annotations__)}"
        )
    count = check_whole("n_replicas", n_replicas, 1, MAX_REPLICAS)
    offset = check_whole("rank_offset", options.get("rank_offset", 0), 0, MAX_REPLICAS)
    world = options.get("world_size")
    world = count + offset if world is None else check_whole("world_size", world, 1, MAX_REPLICAS)
    if offset + count > world:
        raise InvalidRequestError(
            f"ranks {offset} to {offset + count - 1} do not fit into a world_size of {world}: "
            "world_size counts the replicas of the whole run, of all its launches"
        )
    if entrypoint_args is not None and not isinstance(entrypoint_args, Mapping):
        raise InvalidRequestError(
            f"entrypoint_args must be a mapping of keyword arguments, not {shown(entrypoint_args)}"
        )
    kwargs = dict(entrypoint_args or {})
    rank_env = _variable(kwargs, "rank_env", RANK_VARIABLE)
    world_size_env = _variable(kwargs, "world_size_env", WORLD_SIZE_VARIABLE)
    check_json(kwargs, "entrypoint_args")
    for name in kwargs:
        if not name.isidentifier():
            raise InvalidRequestError(
                f"entrypoint_args has the key {shown(name)}, which cannot be the name of a keyword "
                "argument"
            )
    rendezvous = kwargs.get("rendezvous_uri")
    if rendezvous is not None:
        check_rendezvous(rendezvous)
    env = check_variables("env", options.get("env"))
    secrets = check_variables("secrets", options.get("secrets"))
    names = Counter([*env, *secrets, rank_env, world_size_env])
    if twice := sorted(name for name, times in names.items() if times > 1):
        raise InvalidRequestError(
            f"{', '.join(twice)} would be set twice: name a variable in one of env, secrets, "
            "rank_env and world_size_env"
        )
    spot, gpu, memory = options.get("spot"), options.get("gpu"), options.get("memory")
    if spot is not None and not isinstance(spot, bool):
        raise InvalidRequestError(f"spot must be True, False or None, not {shown(spot)}")
    if gpu is not None:
        parse_gpu(check_text("gpu", gpu))
    run_id, cohort = options.get("run_id"), options.get("cohort")
    if run_id is None and run_prefix:
        check_run_prefix("the executor's run_id", run_prefix)
    # Never the same twice, and sorted by time
    token = f"{time.time_ns() // 10**6:x}-{os.urandom(4).hex()}"
    name = f"{run_prefix or 'run'}-{token}" if run_id is None else run_id
    for argument, value in (("run_id", name), ("cohort", name if cohort is None else cohort)):
        if not isinstance(value, str) or not is_run_id(value):
            raise InvalidRequestError(
                f"the {argument} {shown(value)} is not allowed: 1 to 48 lower-case letters, digits "
                "and dashes, with a letter or digit at both ends (every backend uses it in names)"
            )
    timeout = options.get("timeout", 3600)
    restarts = options.get("max_restarts")
    return RunRequest(
        run_id=name,
        ranks=tuple(range(offset, offset + count)),
        world_size=world,
        entrypoint=entrypoint_name(entrypoint),
        kwargs=kwargs,
        cohort=name if cohort is None else cohort,
        rendezvous_uri=rendezvous,
        rank_env=rank_env,
        world_size_env=world_size_env,
        gpu=gpu,
        timeout=None if timeout is None else check_seconds("timeout", timeout, positive=True),
        cpu=check_amount("cpu", options.get("cpu")),
        memory=None if memory is None else check_text("memory", memory),
        env=env,
        secrets=secrets,
        labels=check_texts("labels", options.get("labels")),
        spot=spot,
        max_restarts=0 if restarts is None else check_restarts("max_restarts", restarts),
        named=run_id is not None,
    )


def refuse(request: RunRequest, platform: str, reasons: Mapping[str, str]) -> None:
    """Refuse what a launch asks for and a platform does not have.

    Args:
        request: The launch.
        platform: The platform in words, such as ``"local processes"``.
        reasons: Why there is none of it, and what to do, by the names of the launch's arguments.

    Raises:
        InvalidRequestError: One of these arguments was given.
    """
    for name, reason in reasons.items():
        if value := getattr(request, name):
            raise InvalidRequestError(
                f"{name}={shown(value)} cannot be honoured by {platform}: {reason}"
            )


def check_restarts(name: str, value: object) -> int:
    """Check for a number of restarts that a launch may ask for.

    Raises:
        InvalidRequestError: The value is not a whole number from 0 to 1000.
    """
    return check_whole(name, value, 0, 1000)


def check_rendezvous(value: object) -> str:
    """Check for the URI or path of a rendezvous, as text that a variable can hold.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= _LONGEST_URI
        or "\0" in value
        or has_half_a_pair(value)
    ):
        raise InvalidRequestError(
            f"rendezvous_uri must be text that is a path or URI, of at most {_LONGEST_URI} "
            f"characters, not {shown(value)}"
        )
    return value


def is_run_id(name: str) -> bool:
    """Return whether a run can have this name."""
    return _RUN_ID.fullmatch(name) is not None


def check_run_prefix(name: str, value: object) -> str:
    """Check for text that can begin the names of runs.

    Raises:
        InvalidRequestError: The value is something else.
    """
    prefix = check_text(name, value)
    if len(prefix) > _PREFIX_LENGTH or not is_run_id(prefix):
        raise InvalidRequestError(
            f"{name}={shown(prefix)} cannot begin the names of runs: 1 to {_PREFIX_LENGTH} "
            "lower-case letters, digits and dashes are allowed, with a letter or digit at both ends"
        )
    return prefix


def _variable(kwargs: dict[str, Any], argument: str, own_name: str) -> str:
    """Take the name of a variable out of the arguments of an entrypoint.

    ``own_name`` is the name of the variable that the launch sets in any case, and the default.
    """
    name = kwargs.pop(argument, own_name)
    if (
        not isinstance(name, str)
        or not is_variable_name(name)
        or (name != own_name and is_reserved(name))
    ):
        raise InvalidRequestError(
            f"{argument} must be the name of an environment variable that the launch does not set "
            f"itself, not {shown(name)}"
        )
    return name
