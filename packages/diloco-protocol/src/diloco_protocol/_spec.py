"""The spec of one replica, and the channels through which it is sent."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ._checks import check_seconds, check_whole, or_none, read_whole, shown
from ._errors import InvalidRequestError, SpecVersionError
from ._fields import LARGEST
from ._json import canonical, check_json, dumps, loads
from ._redact import redact_json, redact_text, redacted_repr
from ._variables import (
    ATTEMPT_VARIABLE,
    BACKEND_VARIABLE,
    COHORT_VARIABLE,
    PLACE_VARIABLE,
    RANK_VARIABLE,
    RENDEZVOUS_VARIABLE,
    RESTARTS_VARIABLE,
    RUN_ID_VARIABLE,
    SPEC_PREFIX,
    WORLD_SIZE_VARIABLE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPEC_VERSION = 4
# What specs of earlier versions do not say.
_UNSAID: dict[int, dict[str, Any]] = {
    2: {"restarts": None, "backend": "", "place": ""},
    3: {"backend": "", "place": ""},
}

# The kernel takes at most 128 KiB per environment string, name included.
_TEXTS = ("entrypoint", "run_id", "cohort", "rank_env", "world_size_env", "backend", "place")
_ENVIRONMENT_PIECE = 120_000
# Some clouds take at most 256 characters per argument.
_ARGUMENT_PIECE = 220
_ARGUMENT_NAME = "--spec-piece="
_MOST_PIECES = 1_000_000


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
        for name in _TEXTS:
            if type(text := getattr(self, name)) is not str:
                raise InvalidRequestError(f"a spec's {name} must be text, not {shown(text)}")
        if self.rendezvous_uri is not None and type(self.rendezvous_uri) is not str:
            raise InvalidRequestError(
                f"a spec's rendezvous_uri must be text or None, not {shown(self.rendezvous_uri)}"
            )
        if type(self.kwargs) is not dict:
            raise InvalidRequestError(f"a spec's kwargs must be a dict, not {shown(self.kwargs)}")
        or_none(check_seconds)("a spec's timeout", self.timeout)
        check_seconds("a spec's grace", self.grace)
        if self.restarts is not None and type(self.restarts) is not bool:
            raise InvalidRequestError(
                f"a spec's restarts must be True, False or None, not {shown(self.restarts)}"
            )

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
            SpecVersionError: The data was written by another version; the error names both.
            InvalidRequestError: The data is not a spec.
        """
        if not isinstance(data, dict) or "version" not in data:
            raise InvalidRequestError("this is not a replica spec: it has no version")
        if type(data["version"]) is int and data["version"] in _UNSAID:
            data = {**_UNSAID[data["version"]], **data, "version": SPEC_VERSION}
        if type(data["version"]) is not int or data["version"] != SPEC_VERSION:
            raise SpecVersionError(
                f"this replica's spec has version {shown(data['version'])}, but its "
                f"diloco-protocol reads version {SPEC_VERSION}: install the same diloco-protocol "
                "in the replica as in the launcher"
            )
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


def spec_to_environment(
    spec: ReplicaSpec, *, piece_bytes: int = _ENVIRONMENT_PIECE
) -> dict[str, str]:
    """Return a spec as environment variables ``DILOCO_SPEC_0``, ``DILOCO_SPEC_1`` and so on.

    The spec is in Base64, so that no shell, YAML or ``$(…)`` expansion on the way changes it, and
    in pieces that are small enough for every operating system.
    """
    return {f"{SPEC_PREFIX}{number}": piece for number, piece in enumerate(_cut(spec, piece_bytes))}


def spec_from_environment(environ: Mapping[str, str], *, sha256: str | None = None) -> ReplicaSpec:
    """Make a spec from the variables of :func:`spec_to_environment`.

    Args:
        environ: Environment variables; those without the prefix of a spec are ignored.
        sha256: The :func:`spec_sha256` of the variables that the launcher wrote; variables that
            follow these are ignored, too. None if no other program can have written any.

    Raises:
        InvalidRequestError: There is no spec, a piece of it is missing or damaged, or it has
            another digest.
        SpecVersionError: The spec was written by another version.
    """
    pieces = {name: value for name, value in environ.items() if name.startswith(SPEC_PREFIX)}
    if not pieces:
        raise InvalidRequestError(
            f"there is no replica spec in the environment ({SPEC_PREFIX}0 is not set)"
        )
    if sha256 is not None:
        return _join(_named(pieces, sha256))
    missing = [f"{SPEC_PREFIX}{n}" for n in range(len(pieces)) if f"{SPEC_PREFIX}{n}" not in pieces]
    if missing:
        raise InvalidRequestError(f"the replica spec in the environment lacks {', '.join(missing)}")
    return _join([pieces[f"{SPEC_PREFIX}{number}"] for number in range(len(pieces))])


def _named(pieces: Mapping[str, str], sha256: str) -> list[str]:
    """Return the pieces that have a digest; other programs may have added some behind them."""
    import hashlib  # slow to import

    digest = hashlib.sha256()
    named: list[str] = []
    while (piece := pieces.get(f"{SPEC_PREFIX}{len(named)}")) is not None:
        named.append(piece)
        digest.update(piece.encode())
        if digest.hexdigest() == sha256:
            return named
    raise InvalidRequestError(
        "the replica spec in the environment is not the one that was launched: its digest is "
        f"{digest.hexdigest()}, and the launch named {shown(sha256)}. The launch did not write it; "
        "nothing of it was run"
    )


def spec_sha256(pieces: Mapping[str, str]) -> str:
    """Return the digest of what :func:`spec_to_environment` made, as 64 hexadecimal digits.

    A launcher that keeps the variables where others may write tells the runner their digest in a
    way that only the launcher can use: ``--spec-sha256``.
    """
    import hashlib  # slow to import

    text = "".join(pieces[f"{SPEC_PREFIX}{number}"] for number in range(len(pieces)))
    return hashlib.sha256(text.encode()).hexdigest()


def spec_to_arguments(spec: ReplicaSpec, *, piece_characters: int = _ARGUMENT_PIECE) -> list[str]:
    """Return a spec as command-line arguments of at most 256 characters each.

    Each is ``--spec-piece=<number>/<count>:<piece>``. The runner accepts them in any order.
    """
    pieces = _cut(spec, piece_characters)
    return [
        f"{_ARGUMENT_NAME}{number}/{len(pieces)}:{piece}" for number, piece in enumerate(pieces)
    ]


def spec_from_arguments(arguments: Sequence[str]) -> ReplicaSpec:
    """Make a spec from the arguments of :func:`spec_to_arguments`, in any order.

    Other arguments are ignored.

    Raises:
        InvalidRequestError: There is no spec, or a piece of it is missing or damaged.
        SpecVersionError: The spec was written by another version.
    """
    pieces: dict[int, str] = {}
    counts = set()
    for argument in arguments:
        if argument.startswith(_ARGUMENT_NAME):
            place, _, piece = argument.removeprefix(_ARGUMENT_NAME).partition(":")
            number, _, count = place.partition("/")
            pieces[read_whole("the number of a spec's piece", number, 0, _MOST_PIECES)] = piece
            counts.add(read_whole("the number of a spec's pieces", count, 1, _MOST_PIECES))
    if len(counts) != 1 or sorted(pieces) != list(range(counts.pop())):
        raise InvalidRequestError(
            f"the arguments hold an incomplete replica spec: pieces {sorted(pieces)}"
        )
    return _join([piece for _, piece in sorted(pieces.items())])


def _cut(spec: ReplicaSpec, size: int) -> list[str]:
    text = base64.b64encode(spec.to_json().encode()).decode()
    return [text[start : start + size] for start in range(0, len(text), size)]


def _join(pieces: list[str]) -> ReplicaSpec:
    try:
        text = base64.b64decode("".join(pieces), validate=True).decode()
    except ValueError as error:
        raise InvalidRequestError(f"the replica spec is damaged: {error}") from None
    return ReplicaSpec.from_json(text)


def redact_spec(spec: ReplicaSpec) -> ReplicaSpec:
    """Return a spec as a plan may show it: the values that its caller chose are without secrets."""
    uri = spec.rendezvous_uri
    return replace(
        spec,
        entrypoint=redact_text(spec.entrypoint),
        kwargs=redact_json(spec.kwargs),
        rank_env=redact_text(spec.rank_env),
        world_size_env=redact_text(spec.world_size_env),
        rendezvous_uri=None if uri is None else redact_text(uri),
    )
