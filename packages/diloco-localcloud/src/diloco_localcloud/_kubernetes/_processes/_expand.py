"""``$(NAME)`` in commands and values, as Kubernetes expands it."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PATTERN = re.compile(r"\$(\$|\(([^)]*)\))")


def expand(text: str, known: Mapping[str, str]) -> str:
    """Put the values in: ``$(NAME)`` becomes its value or stays if there is none, ``$$`` becomes ``$``."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return known.get(match[2], match[0])

    return _PATTERN.sub(value, text)
