"""Finding what installed packages supply: backends, and verbs of the command ``diloco``.

A package describes a verb as a backend describes its constructor, with a class of
:class:`Options`, and names it in the entry-point group ``diloco.commands``::

    @command(ExportOptions)
    def export(options):
        \"\"\"Write the model of a run to a file.\"\"\"
        ...
        return Answer({"outer_steps": steps}, (f"the model after {steps} outer steps",))

On the command line, options without a default are arguments, in their order, and the others are
written ``--name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ._checks import shown
from ._errors import InvalidRequestError
from ._hooks import Option
from ._options import Options, options_of

T = TypeVar("T", bound=Options)

EXECUTORS = "diloco.executors"
COMMANDS = "diloco.commands"


def executors() -> dict[str, type[Any]]:
    """Return the executor classes of all installed backends, by name.

    Those that cannot be loaded are in :func:`load_errors`.
    """
    loaded = _all_loaded()
    return {name: item for name, item in loaded.items() if not isinstance(item, Exception)}


def load_errors() -> dict[str, Exception]:
    """Return the errors of the installed backends that cannot be loaded, by name."""
    return {name: item for name, item in _all_loaded().items() if isinstance(item, Exception)}


def executor_names() -> list[str]:
    """Return the names of all installed backends, sorted; none of them is imported."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    return sorted(entry_points(group=EXECUTORS).names)


def get_executor(name: str) -> type[Any]:
    """Return the executor class of a backend; no other backend is imported.

    Raises:
        InvalidRequestError: It is not installed, or cannot be loaded; the error says why, and which
            backends there are.
    """
    backend: type[Any] | None = _required(EXECUTORS, name)
    if backend is None:
        known = ", ".join(executor_names()) or "none"
        raise InvalidRequestError(f"no backend {shown(name)} is installed; installed are: {known}")
    return backend


def get_command(name: str) -> Command | None:
    """Return a verb that an installed package adds to the command ``diloco``.

    Returns:
        The verb; None if no installed package supplies it.

    Raises:
        InvalidRequestError: It cannot be loaded, or is not a :class:`Command`.
    """
    loaded = _required(COMMANDS, name)
    if loaded is not None and not isinstance(loaded, Command):
        raise InvalidRequestError(
            f"the command {name!r} is installed but is not a Command: {shown(loaded)}"
        )
    return loaded


def _all_loaded() -> dict[str, type[Any] | Exception]:
    return {name: _loaded(EXECUTORS, name) for name in executor_names()}


def _required(group: str, name: str) -> Any:
    loaded = _loaded(group, name)
    if isinstance(loaded, Exception):
        raise InvalidRequestError(
            f"{name!r} is installed but cannot be loaded: {loaded}"
        ) from loaded
    return loaded


def _loaded(group: str, name: str) -> Any:
    """Return what a package has under a name, the exception of loading it, or None if none has."""
    from importlib.metadata import entry_points

    points = {point.value: point for point in entry_points(group=group, name=name)}
    if len(points) > 1:
        return InvalidRequestError(
            f"several installed packages provide {name!r}: {', '.join(points)}; uninstall all but "
            "one"
        )
    try:
        return next((point.load() for point in points.values()), None)
    # Any exception of a package's import is kept, and shown later
    except Exception as error:  # noqa: BLE001
        return error


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a verb.

    Attributes:
        values: JSON values by name, for programs.
        lines: The same in sentences, for people.
    """

    values: Mapping[str, Any]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A verb: a function whose options are described. Called with them, by name.

    Attributes:
        takes: The class of its options.
        run: The function, which is called with an instance of that class.
    """

    takes: type[Options]
    run: Callable[[Any], Answer]

    @property
    def help(self) -> str:
        """Return the docstring of the function; empty if Python has removed the docstrings."""
        return inspect.getdoc(self.run) or ""

    def options(self) -> list[Option]:
        """Return the options, in order."""
        return options_of(self.takes)

    def __call__(self, **values: Any) -> Answer:
        """Check the options, and call the function.

        Raises:
            InvalidRequestError: A value is not allowed.
            DilocoError: The function raised it.
        """
        return self.run(self.takes(**values))


def command(options: type[T]) -> Callable[[Callable[[T], Answer]], Command]:
    """Make a :class:`Command` of a function that takes an instance of a class of options."""
    return lambda run: Command(options, run)
