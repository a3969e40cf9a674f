"""Environment variables as short strings.

They are for platforms that accept long variables only in another form, such as SageMaker's
hyperparameters.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from ._errors import InvalidRequestError
from ._json import dumps, loads

PREFIX = "DILOCO_ENV_"


def variables_to_strings(variables: Mapping[str, str], *, piece_bytes: int) -> dict[str, str]:
    """Return variables as strings ``DILOCO_ENV_0``, ``DILOCO_ENV_1`` and so on.

    Each string has at most ``piece_bytes`` bytes; without variables there are no strings. The
    runner sets the variables if the strings are among its ``--spec-strings``.
    """
    if not variables:
        return {}
    text = base64.b64encode(dumps(dict(variables)).encode()).decode()
    pieces = [text[start : start + piece_bytes] for start in range(0, len(text), piece_bytes)]
    return {f"{PREFIX}{number}": piece for number, piece in enumerate(pieces)}


def variables_from_strings(strings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of :func:`variables_to_strings`; other strings are ignored.

    Raises:
        InvalidRequestError: A piece is missing or damaged.
    """
    pieces = {name: piece for name, piece in strings.items() if name.startswith(PREFIX)}
    if not pieces:
        return {}
    names = [f"{PREFIX}{number}" for number in range(len(pieces))]
    if missing := [name for name in names if name not in pieces]:
        raise InvalidRequestError(f"the environment variables lack {', '.join(missing)}")
    try:
        text = base64.b64decode("".join(pieces[name] for name in names), validate=True).decode()
    except ValueError as error:
        raise InvalidRequestError(f"the environment variables are damaged: {error}") from None
    variables = loads(text, "what DILOCO_ENV_0 begins")
    if type(variables) is not dict or not all(type(value) is str for value in variables.values()):
        raise InvalidRequestError("what DILOCO_ENV_0 begins is not a JSON object of text")
    return variables
