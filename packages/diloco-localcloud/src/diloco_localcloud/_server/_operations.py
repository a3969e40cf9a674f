"""The operations of an API, each a method that is named after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PREFIX = "_serve_"


def operations(group: object) -> dict[str, Callable[..., Any]]:
    """Return the methods by their operations: ``ListTags`` is served by ``_serve_list_tags``."""
    names = [name for name in dir(group) if name.startswith(_PREFIX)]
    return {name[len(_PREFIX) :].title().replace("_", ""): getattr(group, name) for name in names}
