"""The spec of one replica, and the environment variables that it sets or that a caller may set."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any

from ._checks import check_seconds, check_texts, check_whole, or_none, shown
from ._errors import InvalidRequestError
from ._fields import LARGEST, check_version
from ._json import canonical, check_json, dumps, loads
from ._redact import redact_json, redacted_repr

RANK_VARIABLE = "REPLICA_RANK"
WORLD_SIZE_VARIABLE = "REPLICA_WORLD_SIZE"
RENDEZVOUS_VARIABLE = "RENDEZVOUS_URI"
RUN_ID_VARIABLE = "DILOCO_RUN_ID"
COHORT_VARIABLE = "DILOCO_COHORT"
ATTEMPT_VARIABLE = "DILOCO_ATTEMPT"
RESTARTS_VARIABLE = "DILOCO_RESTARTS"
"""1 or 0: whether a replica that has ended can be started again. Not set if that is not known."""
LAST_ATTEMPT_VARIABLE = "DILOCO_LAST_ATTEMPT"
"""1 if nothing starts the replica again when this attempt fails. Not set if that is not known."""
BACKEND_VARIABLE = "DILOCO_BACKEND"
"""Name of the backend that has started the replica. Not set if that is not known."""
PLACE_VARIABLE = "DILOCO_PLACE"
"""Where the backend runs the replica, such as a region. Not set if that is not known."""
SPEC_PREFIX = "DILOCO_SPEC_"
"""Prefix of the names of the variables that carry a spec, piece by piece."""

_RESERVED = frozenset({
    RANK_VARIABLE, WORLD_SIZE_VARIABLE, RENDEZVOUS_VARIABLE, RUN_ID_VARIABLE, COHORT_VARIABLE,
    ATTEMPT_VARIABLE, RESTARTS_VARIABLE, LAST_ATTEMPT_VARIABLE, BACKEND_VARIABLE, PLACE_VARIABLE,
})  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST = 131_071
"""Bytes of ``NAME=value``, or of an argument, that Linux starts programs with (MAX_ARG_STRLEN)."""


def is_reserved(name: str) -> bool:
    """Return whether the protocol itself sets an environment variable, so that a caller may not."""
    return name in _RESERVED or name.startswith(SPEC_PREFIX)


def is_variable_name(name: str) -> bool:
    """Return whether every shell and container accepts a name for an environment variable."""
    return _NAME.fullmatch(name) is not None


def check_variables(name: str, values: object) -> dict[str, str]:
    """Check environment variables that a caller sets, and return them sorted by their names.

    None stands for an empty mapping.

    Args:
        name: Name of the mapping in the error.
        values: The mapping to check.

    Raises:
        InvalidRequestError: A name or value is not allowed for an environment variable, both
            together are too long for one, or the protocol itself sets the variable.
    """
    variables = check_texts(name, values)
    for key, value in variables.items():
        if not is_variable_name(key):
            raise InvalidRequestError(
                f"{name} has the name {shown(key)}: letters, digits and _ are allowed, and no "
                "digit at the beginning"
            )
        if is_reserved(key):
            raise InvalidRequestError(
                f"{name} may not set {shown(key)[1:-1]}: the launch itself sets it for every "
                "replica"
            )
        size = len(f"{key}={value}".encode())
        if "\0" in value or size > LONGEST:
            raise InvalidRequestError(
                f"{name}[{shown(key)}] has {size} bytes with its name, and Linux takes {LONGEST} "
                "without a NUL character: pass it in a file, or as an argument of the entrypoint"
            )
    return variables


SPEC_VERSION = 4
_TEXTS = ("entrypoint", "run_id", "cohort", "rank_env", "world_size_env", "backend", "place")
_TYPES: dict[str, tuple[set[type], str]] = {
    **dict.fromkeys(_TEXTS, ({str}, "text")),
    "rendezvous_uri": ({str, NoneType}, "text or None"),
    "kwargs": ({dict}, "a dict"),
    "restarts": ({bool, NoneType}, "True, False or None"),
}


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Everything that the runner of one replica needs to know.

    Attributes:
        entrypoint: ``"package.module:function"``.
        kwargs: Its keyword arguments, a JSON object.
        rank: The rank of this replica.
        world_size: Number of replicas of the run.
        attempt: Which attempt of the rank this is, from 1.
        run_id: Name of the launch that the replica belongs to.
        cohort: Name that all replicas of the run share, whichever launch they belong to; if it is
            "", the run_id is used.
        rendezvous_uri: Where the replicas meet, if the launch said so.
        rank_env: Name of a variable that will hold the rank, besides ``REPLICA_RANK``.
        world_size_env: Name of a variable that will hold the number of replicas, besides
            ``REPLICA_WORLD_SIZE``.
        timeout: Seconds for which an attempt may run, from its start; None for no limit.
        grace: Seconds between SIGTERM and SIGKILL when the replica is ended.
        restarts: Whether the replicas of the cohort can be started again when they have ended; None
            if that is not known.
        backend: Name of the backend that starts the replica; empty if that is not known.
        place: Where it runs, such as a region; empty if that is not known.
        version: Version of this record.

    Raises:
        InvalidRequestError: A value is not allowed.
    """

    entrypoint: str
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    attempt: int = 1
    run_id: str = ""
    cohort: str = ""
    rendezvous_uri: str | None = None
    rank_env: str = RANK_VARIABLE
    world_size_env: str = WORLD_SIZE_VARIABLE
    timeout: float | None = None
    grace: float = 10.0
    restarts: bool | None = None
    backend: str = ""
    place: str = ""
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        # A channel that delivers 0 or "" for a value that it has lost must not start a replica.
        for name, least in (("rank", 0), ("world_size", 1), ("attempt", 1)):
            check_whole(f"a spec's {name}", getattr(self, name), least, LARGEST)
        if self.rank >= self.world_size:
            raise InvalidRequestError(
                f"a spec's rank must be below its world_size of {self.world_size}, not {self.rank}"
            )
        for name, (kinds, words) in _TYPES.items():
            if type(value := getattr(self, name)) not in kinds:
                raise InvalidRequestError(f"a spec's {name} must be {words}, not {shown(value)}")
        or_none(check_seconds)("a spec's timeout", self.timeout)
        check_seconds("a spec's grace", self.grace)

    def __hash__(self) -> int:
        return hash(canonical(self._fields()))

    def __repr__(self) -> str:
        return redacted_repr(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as JSON values; the kwargs in it are the spec's own and not a copy.

        Raises:
            InvalidRequestError: JSON cannot carry the kwargs exactly; the error names the path to
                the value.
        """
        check_json(self.kwargs, "kwargs")
        return self._fields()

    def to_json(self) -> str:
        """Return the spec as compact JSON.

        Raises:
            InvalidRequestError: JSON cannot carry the kwargs exactly; the error names the path to
                the value.
        """
        return dumps(self.to_dict())

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, text: str) -> ReplicaSpec:
        """Make a spec from the result of :meth:`to_json`; raises as :meth:`from_dict` does."""
        return cls.from_dict(loads(text, "this spec"))

    @classmethod
    def from_dict(cls, data: object) -> ReplicaSpec:
        """Make a spec from the result of :meth:`to_dict`.

        Raises:
            SpecVersionError: The data was written by another version, or says of none; the error
                names both.
            InvalidRequestError: The data is not a spec.
        """
        data = check_version("this replica spec", data, SPEC_VERSION)
        names = {f.name for f in fields(cls)}
        if data.keys() != names:
            raise InvalidRequestError(
                f"this spec has the fields {shown(sorted(data))} instead of {sorted(names)}"
            )
        return cls(**data)


def environment(spec: ReplicaSpec) -> dict[str, str]:
    """Return the variables that tell a replica its rank, its run and so on.

    The runner sets them before the entrypoint is imported.
    """
    variables = {
        spec.rank_env: str(spec.rank),
        spec.world_size_env: str(spec.world_size),
        RANK_VARIABLE: str(spec.rank),
        WORLD_SIZE_VARIABLE: str(spec.world_size),
        RUN_ID_VARIABLE: spec.run_id,
        COHORT_VARIABLE: spec.cohort or spec.run_id,
        ATTEMPT_VARIABLE: str(spec.attempt),
    }
    if spec.restarts is not None:
        variables[RESTARTS_VARIABLE] = str(int(spec.restarts))
    if spec.backend:
        variables[BACKEND_VARIABLE] = spec.backend
    if spec.place:
        variables[PLACE_VARIABLE] = spec.place
    if spec.rendezvous_uri is not None:
        variables[RENDEZVOUS_VARIABLE] = spec.rendezvous_uri
    return variables


def redact_spec(spec: ReplicaSpec) -> ReplicaSpec:
    """Return a spec as a plan may show it: the values that its caller chose are without secrets."""
    names = ("entrypoint", "kwargs", "rank_env", "world_size_env", "rendezvous_uri")
    return replace(spec, **{name: redact_json(getattr(spec, name)) for name in names})
