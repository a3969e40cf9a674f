"""The values of options that are given as text, read by their types in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_protocol import FolderJournal, InvalidRequestError, Option
from diloco_protocol.backend import shown

REQUIRED = "(required)"
_IN_JSON = (
    "mapping", "mapping of text to text", "list of mappings", "name to label to values",
    "part of a request", "pod template",
)  # fmt: skip


class UnsetError(InvalidRequestError):
    """Raised when a backend needs an option that was not given, so it was not asked."""


def read_options(
    owner: str, described: Sequence[Option], given: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the options of a backend or a command.

    Args:
        owner: Its name, for errors.
        described: All of its options.
        given: The text that was given for some of them, by name.

    Raises:
        UnsetError: A required option was not given.
        InvalidRequestError: There is no such option, or the text is not a value for it. Limits on
            the value are checked by its owner.
    """
    by_name = {option.name: option for option in described}
    if unknown := sorted(given.keys() - by_name.keys()):
        raise InvalidRequestError(
            f"{owner} has no option {shown(unknown[0])}; it has {', '.join(by_name) or 'none'}"
        )
    required = [name for name, option in by_name.items() if option.default == REQUIRED]
    if missing := [f"--option {owner}.{name}=…" for name in required if name not in given]:
        raise UnsetError(
            f"{owner} needs {' '.join(missing)}, or the same in the variable DILOCO_OPTIONS"
        )
    return {name: read_value(by_name[name], text) for name, text in given.items()}


def read_value(option: Option, text: str) -> Any:
    """Return the value that a text means for an option.

    Raises:
        InvalidRequestError: The text is not a value of its type, or the option cannot be given as
            text.
    """
    read = _READERS.get(option.type)
    if read is None and " or " not in option.type:  # which are words to choose from
        raise InvalidRequestError(
            f"the option {option.name} ({option.type}) cannot be given on the command line"
        )
    try:
        return text if read is None else read(text)
    except InvalidRequestError:  # of a journal, which says more
        raise
    except (KeyError, ValueError, RecursionError):
        raise InvalidRequestError(
            f"{option.name}={shown(text, f'[{option.name}]')} is not allowed: it is a "
            f"{option.type}. Lists are written a,b or as JSON, mappings as JSON"
        ) from None


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _list(text: str) -> Any:
    return json.loads(text) if text.startswith("[") else text.split(",") if text else []


def _flag_or_list(text: str) -> Any:
    return _flag(text) if text.lower() in {"true", "false"} else _list(text)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


_READERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("text", "path", "quantity"), str),
    "whole number": _or_none(int),
    "number": _or_none(float),
    "bool": _flag,
    **dict.fromkeys(("list of text", "list of paths"), _list),
    "True, False or list of text": _flag_or_list,
    **dict.fromkeys(_IN_JSON, json.loads),
    "RunJournal": FolderJournal,
}
