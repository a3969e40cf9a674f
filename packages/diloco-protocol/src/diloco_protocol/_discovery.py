"""Finding the installed backends."""

from __future__ import annotations

from typing import Any

from ._errors import InvalidRequestError

GROUP = "diloco.executors"


def executors() -> dict[str, type[Any]]:
    """The executor classes of all installed backends, by name; those that cannot be loaded are in :func:`load_errors`."""
    return {name: found for name, found in _load().items() if not isinstance(found, Exception)}


def load_errors() -> dict[str, Exception]:
    """Why some installed backends cannot be used, by name."""
    return {name: found for name, found in _load().items() if isinstance(found, Exception)}


def get_executor(name: str) -> type[Any]:
    """The executor class of a backend.

    Raises:
        InvalidRequestError: It is not installed, or cannot be loaded; says why, and which ones there are.
    """
    found = _load()
    backend = found.get(name)
    if backend is None:
        known = ", ".join(sorted(found)) or "none"
        raise InvalidRequestError(f"no backend {name!r} is installed; installed are: {known}")
    if isinstance(backend, Exception):
        raise InvalidRequestError(
            f"the backend {name!r} is installed but cannot be loaded: {backend}"
        ) from backend
    return backend


def _load() -> dict[str, type[Any] | Exception]:
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    found: dict[str, type[Any] | Exception] = {}
    chosen: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        if point.name in chosen and chosen[point.name] != point.value:
            found[point.name] = InvalidRequestError(
                f"two installed packages offer it: {chosen[point.name]} and {point.value}; uninstall one"
            )
            continue
        chosen[point.name] = point.value
        try:
            found[point.name] = point.load()
        except Exception as error:  # noqa: BLE001 - whatever a backend's import raises is kept and shown
            found[point.name] = error
    return found
