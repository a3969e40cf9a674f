"""Import Modal's client; this is slow, and reads the user's settings."""

from __future__ import annotations

from typing import Any

from diloco_protocol import InvalidRequestError, MissingDependencyError


def import_modal() -> Any:
    """Import Modal's client, which takes a second or two, and return the module.

    Raises:
        MissingDependencyError: It is not installed.
        InvalidRequestError: It refuses its settings.
    """
    try:
        import modal

        from . import _wire  # noqa: F401 - imports those parts of the client that may have moved
    except ImportError as error:
        raise MissingDependencyError(
            f"Modal's client cannot be imported ({error}): pip install 'modal>=1.5.5,<1.7'"
        ) from error
    except Exception as error:  # when imported, the client reads its settings
        why = " ".join(str(error).split())
        raise InvalidRequestError(f"Modal's client refuses its settings: {why}") from error
    return modal
