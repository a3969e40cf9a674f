"""The expansion of ``$(NAME)`` in commands and values, as in Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PATTERN = re.compile(r"\$(\$|\(([^)]*)\))")


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by its value, or leave it if there is none; ``$$`` becomes ``$``."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return known.get(match[2], match[0])

    return _PATTERN.sub(value, text)
