"""The Job controller's notation for sets of indexes: ``"0,2,5-9"``."""

from __future__ import annotations

import re

from diloco_protocol import BackendError
from diloco_protocol.backend import shown

_TOKEN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand_indexes(text: str, completions: int) -> frozenset[int]:
    """Return the indexes that a status names.

    Raises:
        BackendError: The text is malformed or names an index that the Job does not have. No index
            is dropped silently.
    """
    indexes: set[int] = set()
    least = 0  # the controller writes them in order, so no index appears twice
    for token in text.split(",") if text else []:
        match = _TOKEN.fullmatch(token)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not least <= first <= last < completions:
            raise BackendError(
                f"the cluster lists the indexes {shown(text)} for a Job of {completions} "
                "completions"
            )
        least = last + 1
        indexes.update(range(first, least))
    return frozenset(indexes)
