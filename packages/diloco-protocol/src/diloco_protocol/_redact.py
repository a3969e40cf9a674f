"""Keeping secrets out of what is shown."""

from __future__ import annotations

import re

REDACTED = "<redacted>"
"""What stands in place of a secret."""

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE
)


def redact(name: str, value: str) -> str:
    """The value of a variable as a plan may show it: ``"<redacted>"`` if its name looks like that of a secret."""
    return REDACTED if _SECRET_NAME.search(name) else value
