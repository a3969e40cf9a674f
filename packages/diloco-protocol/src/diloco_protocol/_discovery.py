"""Finding what installed packages supply: backends, and verbs of the command ``diloco``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ._checks import shown
from ._errors import InvalidRequestError
from ._hooks import Option
from ._options import Options, options_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


EXECUTORS = "diloco.executors"
COMMANDS = "diloco.commands"


def executors() -> dict[str, type[Any]]:
    """Return the executor classes of all installed backends, by name.

    Those that cannot be loaded are in :func:`load_errors`.
    """
    return {name: loaded for name, loaded in _load().items() if not isinstance(loaded, Exception)}


def load_errors() -> dict[str, Exception]:
    """Return the errors of the installed backends that cannot be loaded, by name."""
    return {name: loaded for name, loaded in _load().items() if isinstance(loaded, Exception)}


def executor_names() -> list[str]:
    """Return the names of all installed backends, sorted; none of them is imported."""
    return sorted(_installed(EXECUTORS))


def get_executor(name: str) -> type[Any]:
    """Return the executor class of a backend; no other backend is imported.

    Raises:
        InvalidRequestError: It is not installed, or cannot be loaded; the error says why, and which
            backends there are.
    """
    installed = _installed(EXECUTORS)
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise InvalidRequestError(f"no backend {shown(name)} is installed; installed are: {known}")
    backend: type[Any] = _required(installed[name], f"the backend {name!r}")
    return backend


def get_command(name: str) -> Command | None:
    """Return a verb that an installed package adds to the command ``diloco``.

    Returns:
        The verb; None if no installed package supplies it.

    Raises:
        InvalidRequestError: It cannot be loaded, or is not a :class:`Command`.
    """
    point = _installed(COMMANDS).get(name)
    if point is None:
        return None
    loaded = _required(point, f"the command {name!r}")
    if not isinstance(loaded, Command):
        raise InvalidRequestError(
            f"the command {name!r} is installed but is not a Command: {shown(loaded)}"
        )
    return loaded


def _load() -> dict[str, type[Any] | Exception]:
    return {name: _loaded(point) for name, point in _installed(EXECUTORS).items()}


def _installed(group: str) -> dict[str, EntryPoint | InvalidRequestError]:
    """Return the entry points of a group by name; an error where two packages have one name."""
    from importlib.metadata import EntryPoint, entry_points  # slow to import, and seldom needed

    installed: dict[str, EntryPoint | InvalidRequestError] = {}
    for point in entry_points(group=group):
        other = installed.setdefault(point.name, point)
        if isinstance(other, EntryPoint) and other.value != point.value:
            what = "backend" if group == EXECUTORS else "command"
            installed[point.name] = InvalidRequestError(
                f"two installed packages provide this {what}: {other.value} and {point.value}; "
                "uninstall one"
            )
    return installed


def _loaded(point: EntryPoint | InvalidRequestError) -> Any:
    """Return what an entry point names, or the exception with which it could not be loaded."""
    if isinstance(point, Exception):
        return point
    try:
        return point.load()
    # Any exception of a package's import is kept, and shown later
    except Exception as error:  # noqa: BLE001
        return error


def _required(point: EntryPoint | InvalidRequestError, what: str) -> Any:
    loaded = _loaded(point)
    if isinstance(loaded, Exception):
        raise InvalidRequestError(f"{what} is installed but cannot be loaded: {loaded}") from loaded
    return loaded


T = TypeVar("T", bound=Options)


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
