"""The channels through which a spec and environment variables are sent: strings of bounded length.

The text is in Base64, so that no shell, YAML or ``$(…)`` expansion on the way changes it, and in
pieces that are small enough for the channel.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from ._checks import read_whole
from ._errors import InvalidRequestError
from ._json import dumps, loads_texts
from ._spec import SPEC_PREFIX, ReplicaSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The kernel takes at most 128 KiB per environment string, name included.
_ENVIRONMENT_PIECE = 120_000
# Some clouds take at most 256 characters per argument.
_ARGUMENT_PIECE = 220
_ARGUMENT_NAME = "--spec-piece="
_MOST_PIECES = 1_000_000
_VARIABLES_PREFIX = "DILOCO_ENV_"


def spec_to_environment(
    spec: ReplicaSpec, *, piece_bytes: int = _ENVIRONMENT_PIECE
) -> dict[str, str]:
    """Return a spec as environment variables ``DILOCO_SPEC_0``, ``DILOCO_SPEC_1`` and so on."""
    return _numbered(SPEC_PREFIX, _cut(spec.to_json(), piece_bytes))


def spec_from_environment(environ: Mapping[str, str]) -> ReplicaSpec:
    """Make a spec from the variables of :func:`spec_to_environment`.

    Args:
        environ: Environment variables; those without the prefix of a spec are ignored.

    Raises:
        InvalidRequestError: There is no spec, or a piece of it is missing or damaged.
        SpecVersionError: The spec was written by another version.
    """
    what = "the replica spec in the environment"
    if not any(name.startswith(SPEC_PREFIX) for name in environ):
        raise InvalidRequestError(
            f"there is no replica spec in the environment ({SPEC_PREFIX}0 is not set)"
        )
    return ReplicaSpec.from_json(_join(_in_order(SPEC_PREFIX, environ, what), what))


def spec_to_arguments(spec: ReplicaSpec, *, piece_characters: int = _ARGUMENT_PIECE) -> list[str]:
    """Return a spec as command-line arguments of at most 256 characters each.

    Each is ``--spec-piece=<number>/<count>:<piece>``. The runner accepts them in any order.
    """
    pieces = _cut(spec.to_json(), piece_characters)
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
    text = _join([piece for _, piece in sorted(pieces.items())], "the replica spec")
    return ReplicaSpec.from_json(text)


def variables_to_strings(variables: Mapping[str, str], *, piece_bytes: int) -> dict[str, str]:
    """Return variables as strings ``DILOCO_ENV_0``, ``DILOCO_ENV_1`` and so on.

    They are for platforms that accept long variables only in another form, such as SageMaker's
    hyperparameters. Each string has at most ``piece_bytes`` bytes; without variables there are no
    strings. The runner sets the variables if the strings are among its ``--spec-strings``.
    """
    if not variables:
        return {}
    return _numbered(_VARIABLES_PREFIX, _cut(dumps(dict(variables)), piece_bytes))


def variables_from_strings(strings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of :func:`variables_to_strings`; other strings are ignored.

    Raises:
        InvalidRequestError: A piece is missing or damaged.
    """
    what = "the list of environment variables"
    pieces = _in_order(_VARIABLES_PREFIX, strings, what)
    return loads_texts(_join(pieces, what), what) if pieces else {}


def _cut(text: str, size: int) -> list[str]:
    encoded = base64.b64encode(text.encode()).decode()
    return [encoded[start : start + size] for start in range(0, len(encoded), size)]


def _join(pieces: Sequence[str], what: str) -> str:
    try:
        return base64.b64decode("".join(pieces), validate=True).decode()
    except ValueError as error:
        raise InvalidRequestError(f"{what} is damaged: {error}") from None


def _numbered(prefix: str, pieces: Sequence[str]) -> dict[str, str]:
    return {f"{prefix}{number}": piece for number, piece in enumerate(pieces)}


def _in_order(prefix: str, strings: Mapping[str, str], what: str) -> list[str]:
    names = [
        f"{prefix}{number}" for number in range(sum(name.startswith(prefix) for name in strings))
    ]
    if missing := [name for name in names if name not in strings]:
        raise InvalidRequestError(f"{what} lacks {', '.join(missing)}")
    return [strings[name] for name in names]
