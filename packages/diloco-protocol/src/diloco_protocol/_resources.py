"""How many GPUs of which model a replica asks for: one grammar for all backends."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ._checks import shown
from ._errors import InvalidRequestError

ANY = "any"
"""The name that stands for every model."""

# Names may hold single blanks, as those of nvidia-smi do ("RTX 4090"), and end as those of Modal do
# ("H100!").
_REQUEST = re.compile(
    r"(?P<bare>\d{1,9})|(?P<name>[A-Za-z][\w.-]*(?: [\w.-]+)*[!+]?)(?::(?P<count>\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The GPUs of one replica.

    Attributes:
        name: The model as it was written, or ``"any"``. The backend decides which models there are.
        count: How many, from 1.
    """

    name: str
    count: int


def parse_gpu(text: str) -> GpuRequest:
    """What ``gpu=`` asks for: ``"H100"`` (one), ``"H100:8"``, or ``"2"`` and ``"any:2"`` for two of any model.

    Raises:
        InvalidRequestError: The text has another form, or asks for none.
    """
    match = _REQUEST.fullmatch(text.strip())
    count = 0 if match is None else int(match["bare"] or match["count"] or 1)
    if match is None or count == 0:
        raise InvalidRequestError(
            f"gpu={shown(text)} is not a request for GPUs: give a model ('H100'), a model and a "
            "number of GPUs for each replica ('H100:8'), or a number of any model ('2', 'any:2'); "
            "leave gpu out for none"
        )
    name = match["name"] or ANY
    return GpuRequest(ANY if name.lower() == ANY else name, count)
