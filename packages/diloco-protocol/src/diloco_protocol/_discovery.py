"""Finding the installed backends."""

from __future__ import annotations

from typing import Any

from ._checks import shown
from ._errors import InvalidRequestError

GROUP = "diloco.executors"


def executors() -> dict[str, type[Any]]:
    """Return the executor classes of all installed backends, by name.

    Those that cannot be loaded are in :func:`load_errors`.
    """
    return {name: loaded for name, loaded in _load().items() if not isinstance(loaded, Exception)}


def load_errors() -> dict[str, Exception]:
    """Return the errors of the installed backends that cannot be loaded, by name."""
    return {name: loaded for name, loaded in _load().items() if isinstance(loaded, Exception)}


def get_executor(name: str) -> type[Any]:
    """Return the executor class of a backend.

    Raises:
        InvalidRequestError: It is not installed, or cannot be loaded; the error says why, and which
            backends there are.
    """
    loaded = _load()
    backend = loaded.get(name)
    if backend is None:
        known = ", ".join(sorted(loaded)) or "none"
        raise InvalidRequestError(f"no backend {shown(name)} is installed; installed are: {known}")
    if isinstance(backend, Exception):
        raise InvalidRequestError(
            f"the backend {name!r} is installed but cannot be loaded: {backend}"
        ) from backend
    return backend


def _load() -> dict[str, type[Any] | Exception]:
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    loaded: dict[str, type[Any] | Exception] = {}
    chosen: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        if point.name in chosen and chosen[point.name] != point.value:
            loaded[point.name] = InvalidRequestError(
                f"two installed packages provide this backend: {chosen[point.name]} and "
                f"{point.value}; uninstall one"
            )
            continue
        chosen[point.name] = point.value
        try:
            loaded[point.name] = point.load()
        # Any exception of a backend's import is kept, and shown later
        except Exception as error:  # noqa: BLE001
            loaded[point.name] = error
    return loaded
