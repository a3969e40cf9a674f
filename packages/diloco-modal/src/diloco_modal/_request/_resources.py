"""Arguments of ``with_options`` of a launch: GPUs, memory and CPUs in the form that Modal takes."""

from __future__ import annotations

import re
from typing import Any

from diloco_protocol import InvalidRequestError, RunRequest
from diloco_protocol.backend import parse_gpu, shown

from ._options import ModalOptions
from ._payload import call_timeout

# The client does not check names, and a launch with a wrong one would wait for ever.
_GPUS = {
    name.lower(): name
    for name in (
        "T4", "L4", "A10", "A10G", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000",
        "H100", "H100!", "H200", "B200", "B200+", "B300", "any",
    )
}  # fmt: skip
_MOST_MEMORY = 16.0 * 1024 * 1024
_MOST = {"A10": 4, "A10G": 4}
_UNITS = {"": 1 / 2**20, "M": 1e6 / 2**20, "Mi": 1.0, "G": 1e9 / 2**20, "Gi": 1024.0}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)(|M|Mi|G|Gi)", re.ASCII)
# Launches with the same options share these containers. With fewer, the replicas of one launch
# would wait for those of another to end. It is always set, since an app may declare fewer.
_CONTAINERS = 1000


def bound_options(request: RunRequest, options: ModalOptions) -> dict[str, Any]:
    """Return the arguments of ``with_options``.

    They are the same for all ranks; otherwise each rank would have its own pool of containers.
    """
    chosen: dict[str, Any] = {
        "timeout": int(call_timeout(request, options.grace)),
        "max_containers": max(len(request.ranks), _CONTAINERS),
        "gpu": None if request.gpu is None else modal_gpu(request.gpu),
        "cpu": None if request.cpu is None else cores(request.cpu),
        "memory": None if request.memory is None else mebibytes(request.memory),
        "region": options.region,
        "cloud": options.cloud,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def modal_gpu(text: str) -> str:
    """Return ``gpu=`` as Modal takes it, such as ``"H100:8"``.

    Raises:
        InvalidRequestError: Modal has no such GPU, or not so many in one machine.
    """
    gpu = parse_gpu(text)
    name = _GPUS.get(gpu.name.lower())
    if name is None:
        raise InvalidRequestError(
            f"gpu={shown(text)} is not a GPU of Modal; known are {', '.join(_GPUS.values())}"
        )
    most = _MOST.get(name, 8)
    if gpu.count > most:
        raise InvalidRequestError(
            f"gpu={shown(text)}: a machine of Modal has at most {most} GPUs of the model {name}"
        )
    return f"{name}:{gpu.count}"


def mebibytes(text: str) -> int:
    """Return ``memory=`` in MiB.

    Raises:
        InvalidRequestError: It is not an amount, less than 1 MiB, or more than 16 TiB.
    """
    match = _MEMORY.fullmatch(text.strip())
    amount = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= amount <= _MOST_MEMORY:
        raise InvalidRequestError(
            f"memory={shown(text)} is not an amount of memory from 1Mi to 16384Gi: give bytes, or "
            "a number with M, Mi, G or Gi ('16Gi')"
        )
    return int(amount)


def cores(text: str) -> float:
    """Return ``cpu=`` as a number.

    Raises:
        InvalidRequestError: It is not a number from 0.001 to 1024; Modal counts in thousandths.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.001 <= number <= 1024:
        raise InvalidRequestError(
            f"cpu={shown(text)} is not a number of CPUs from 0.001 to 1024, such as 4 or '0.5'"
        )
    return number
