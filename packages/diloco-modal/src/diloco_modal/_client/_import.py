"""Import Modal's client; this is slow, and reads the user's settings."""

from __future__ import annotations

from typing import Any

from diloco_protocol import InvalidRequestError, MissingDependencyError

_refusal: list[Exception] = []
"""The first error of importing the client.

A second try would find half of the client imported, and raise another error.
"""


def import_modal() -> Any:
    """Import Modal's client, which takes a second or two, and return the module.

    Raises:
        MissingDependencyError: It is not installed.
        InvalidRequestError: It refuses its settings.
    """
    try:
        import modal

        from . import _wire  # noqa: F401 - imports those parts of the client that may have moved
    except Exception as error:
        if not isinstance(error, ImportError):  # when imported, the client reads its settings
            _refusal.extend([] if _refusal else [error])
        if not _refusal:
            raise MissingDependencyError(
                f"Modal's client cannot be imported ({error}): pip install 'modal>=1.5.5,<1.7'"
            ) from error
        why = " ".join(str(_refusal[0]).split())
        raise InvalidRequestError(f"Modal's client refuses its settings: {why}") from _refusal[0]
    _refusal.clear()
    return modal
