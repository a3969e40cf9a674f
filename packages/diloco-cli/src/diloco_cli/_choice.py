"""The backends that a verb may use, and their options: what the command line says about them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco_protocol import InvalidRequestError, executor_names
from diloco_protocol.backend import redact, shown

VARIABLE = "DILOCO_OPTIONS"


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
    *,
    needed: bool = True,
) -> Choice:
    """Read ``--backend``, ``--option`` and the variable ``DILOCO_OPTIONS``.

    An option of the command line takes precedence over the same one in the variable. Without an
    installed backend there is nothing to choose from, which is an error if one is needed or named.

    Raises:
        InvalidRequestError: No backend is installed, or not this one; or a text does not say which
            option of which backend it is.
    """
    installed = executor_names() if installed is None else installed
    if not (installed or needed or backend or given):
        return Choice(None, (), {}, ())
    if not installed:
        raise InvalidRequestError(
            "no backend is installed here: install the one that runs your replicas beside "
            "diloco-cli, such as diloco-local, diloco-eks, diloco-sagemaker or diloco-modal"
        )
    if backend is not None and backend not in installed:
        raise InvalidRequestError(
            f"--backend {shown(backend)} is not installed; installed are: {', '.join(installed)}"
        )
    try:
        kept = shlex.split(environ.get(VARIABLE, ""))
    except ValueError as error:
        raise InvalidRequestError(f"the variable {VARIABLE} cannot be read: {error}") from None
    options: dict[str, dict[str, str]] = {}
    for where, texts, default in ((VARIABLE, kept, None), ("--option", given, backend)):
        for owner, name, value in _pairs(where, texts, default):
            if owner not in installed:
                raise InvalidRequestError(
                    f"{where}: {shown(owner)} is not a backend that is installed here; installed "
                    f"are: {', '.join(installed)}"
                )
            if where != VARIABLE and backend not in {None, owner}:
                raise InvalidRequestError(
                    f"--option {owner}.{name}=… is for another backend than --backend {backend}"
                )
            options.setdefault(owner, {})[name] = value
    return Choice(backend, (backend,) if backend else tuple(installed), options, tuple(given))


def _pairs(where: str, texts: Iterable[str], default: str | None) -> Iterable[tuple[str, str, str]]:
    """Yield the backend, the name and the text of each option."""
    for text in texts:
        key, separator, value = text.partition("=")
        owner, dot, name = key.partition(".")
        if not dot:
            owner, name = default or "", key
        if not separator or not owner or not name:
            form = "BACKEND.NAME=VALUE" if default is None else "NAME=VALUE"
            raise InvalidRequestError(
                f"{where}: {shown(key)} is not of the form {form}"
                + (", such as eks.namespace=training" if default is None else "")
            )
        yield owner, name, value
