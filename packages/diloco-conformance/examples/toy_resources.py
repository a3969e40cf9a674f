"""What a launch asks for, in the words of the toy cloud."""

from __future__ import annotations

import re
from typing import Any

from toy_cloud import GPUS

from diloco_protocol import InvalidRequestError, RunRequest
from diloco_protocol.backend import ANY, parse_gpu

UNITS = {"Mi": 2**20, "Gi": 2**30}


def resources(request: RunRequest) -> dict[str, Any]:
    """What each job is to have; what was not asked for is left to the cloud.

    Raises:
        InvalidRequestError: The cloud has no such thing; says what there is.
    """
    asked: dict[str, Any] = {}
    if request.cpu is not None:
        if re.fullmatch(r"\d+(\.\d+)?", request.cpu) is None:
            raise InvalidRequestError(f"cpu={request.cpu!r}: give a number of CPUs, such as 1.5")
        asked["cpu"] = float(request.cpu)
    if request.memory is not None:
        amount = re.fullmatch(r"(\d+)(Mi|Gi)", request.memory)
        if amount is None:
            raise InvalidRequestError(f"memory={request.memory!r}: give it as '512Mi' or '16Gi'")
        asked["memory"] = int(amount[1]) * UNITS[amount[2]]
    if request.gpu is not None:
        gpu = parse_gpu(request.gpu)
        name = gpu.name if gpu.name == ANY else gpu.name.upper()
        if gpu.count > (max(GPUS.values()) if name == ANY else GPUS.get(name, 0)):
            known = ", ".join(f"{model}:{most}" for model, most in GPUS.items())
            raise InvalidRequestError(f"gpu={request.gpu!r}: a machine has at most one of {known}")
        asked["gpu"] = {"model": name, "count": gpu.count}
    if request.spot is not None:
        asked["spot"] = request.spot
    return asked
