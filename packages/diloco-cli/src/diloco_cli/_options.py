"""What the command line says about backends: which ones, and their options as text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol import FolderJournal, InvalidRequestError, Option, executor_names
from diloco_protocol.backend import redact, shown

VARIABLE = "DILOCO_OPTIONS"
REQUIRED = "(required)"
_IN_JSON = (
    "mapping", "mapping of text to text", "list of mappings", "name to label to values",
    "part of a request", "pod template",
)  # fmt: skip
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Choice:
    """The backends that a verb may use, and the text of the options that were given.

    Attributes:
        backend: The one that was named; None for all that are installed.
        names: The names of the backends that may be used.
        options: Text by option, by backend.
        given: The options as they were typed, to type them again.
    """

    backend: str | None
    names: tuple[str, ...]
    options: Mapping[str, Mapping[str, str]]
    given: tuple[str, ...]

    def again(self, verb: str, run: str, backend: str | None, more: Sequence[str] = ()) -> str:
        """Return the command that does something with the same run; secrets are left out."""
        words = ["diloco", verb, run, *more, *(["--backend", backend] if backend else [])]
        for text in self.given:
            name, _, value = text.partition("=")
            words += ["--option", f"{name}={redact(name.rpartition('.')[2], value)}"]
        return shlex.join(words)


def read_choice(
    backend: str | None,
    given: Sequence[str],
    environ: Mapping[str, str],
    installed: Sequence[str] | None = None,
) -> Choice:
    """Read ``--backend``, ``--option`` and the variable ``DILOCO_OPTIONS``.

    The variable has options of any backends, separated by blanks; those that are typed take
    precedence.

    Raises:
        InvalidRequestError: This backend is not installed, or a text does not say which option of
            which backend it is.
    """
    installed = executor_names() if installed is None else installed
    listed = ", ".join(installed) or "none"
    if backend is not None and backend not in installed:
        raise InvalidRequestError(
            f"--backend {shown(backend)} is not installed; installed are: {listed}"
        )
    options: dict[str, dict[str, str]] = {}
    for text in (*environ.get(VARIABLE, "").split(), *given):
        key, separator, value = text.partition("=")
        owner, name = key.split(".", 1) if "." in key else (backend or "", key)
        if not (separator and owner and name):
            raise InvalidRequestError(
                f"the option {shown(key)} is not of the form BACKEND.NAME=VALUE, such as "
                "eks.namespace=training, or NAME=VALUE with --backend"
            )
        if owner not in installed:
            raise InvalidRequestError(
                f"the option {shown(key)}: {owner} is not a backend that is installed here; "
                f"installed are: {listed}"
            )
        if text in given and backend not in {None, owner}:
            raise InvalidRequestError(
                f"--option {owner}.{name}=… is for another backend than --backend {backend}"
            )
        options.setdefault(owner, {})[name] = value
    return Choice(backend, (backend,) if backend else tuple(installed), options, tuple(given))


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


def _list(text: str) -> Any:
    return json.loads(text) if text.startswith("[") else text.split(",") if text else []


def _flag_or_list(text: str) -> Any:
    return _FLAGS[text.lower()] if text.lower() in _FLAGS else _list(text)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


_READERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("text", "path", "quantity"), str),
    "whole number": _or_none(int),
    "number": _or_none(float),
    "bool": lambda text: _FLAGS[text.lower()],
    **dict.fromkeys(("list of text", "list of paths"), _list),
    "True, False or list of text": _flag_or_list,
    **dict.fromkeys(_IN_JSON, json.loads),
    "RunJournal": FolderJournal,
}
