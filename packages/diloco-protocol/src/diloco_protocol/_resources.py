"""The grammar of requests for GPUs (``gpu=``), the same for all backends."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ._checks import shown
from ._errors import InvalidRequestError

ANY = "any"
"""The name that stands for every model."""

# Names may contain single blanks, as those of nvidia-smi do ("RTX 4090"), and may end as those of
# Modal do ("H100!").
_REQUEST = re.compile(
    r"(?P<bare>\d{1,9})|(?P<name>[A-Za-z][\w.-]*(?: [\w.-]+)*[!+]?)(?::(?P<count>\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The GPUs of one replica.

    Attributes:
        name: The model as the caller wrote it, or ``"any"``. The backend decides which models there
            are.
        count: Number of GPUs, from 1.
    """

    name: str
    count: int


def parse_gpu(text: str) -> GpuRequest:
    """Parse a request for GPUs.

    It is ``"H100"`` (one GPU), ``"H100:8"``, or ``"2"`` and ``"any:2"`` for two GPUs of any model.

    Raises:
        InvalidRequestError: The text has another form, or asks for no GPU.
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
