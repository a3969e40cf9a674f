"""Identifiers as Modal makes them."""

import secrets


def new_id(prefix: str) -> str:
    """Return an identifier that never comes again: such as ``fc-`` and 22 letters or digits."""
    return f"{prefix}-{secrets.token_hex(11)}"
