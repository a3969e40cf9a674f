"""Share the machine's GPUs out among the replicas of a run, by ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import ANY, check_names, parse_gpu, shown

from ._environment import find_program

_DEVICE = re.compile(r"(?P<number>\d{1,9})|(?:GPU|MIG(?!-GPU))-[\w-]{1,200}", re.ASCII)
_LINE = re.compile(r"^GPU (\d+): (.*?)(?: \(UUID: ([^)]+)\))?\s*$")
_SLICE = re.compile(r"^ +(MIG \S+) +Device +\d+: \(UUID: (MIG-[^)]+)\)\s*$")
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as ``CUDA_VISIBLE_DEVICES`` names it, and its model name ("" if it is not known)."""

    device: str
    model: str = ""


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """Return the GPUs that ``nvidia-smi -L`` lists; of one that is cut into slices, these."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        if gpu := _LINE.match(line):
            gpus.append(Gpu(gpu[1], gpu[2]))
        elif part := _SLICE.match(line):
            # By its number, CUDA would show the first slice of the GPU above.
            whole = [item for item in gpus[-1:] if item.device.isdecimal()]
            gpus[len(gpus) - len(whole) :] = [Gpu(part[2], part[1])]
    return gpus


def ask_nvidia_smi() -> list[Gpu]:
    """Return the GPUs that ``nvidia-smi -L`` finds here; none if it is missing or fails."""
    program = find_program("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, errors="replace", check=False, timeout=_PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else []


def check_devices(name: str, values: object) -> tuple[str, ...]:
    """Refuse devices of which two may be the same GPU, since replicas would share it.

    Args:
        name: The option or variable that names them, for the error.
        values: Numbers as text, or UUIDs that begin with ``GPU-`` or ``MIG-``.

    Returns:
        The same, without blanks, and without zeros before a number.

    Raises:
        InvalidRequestError: One of them is something else or is named twice, or there are both
            numbers and UUIDs.
    """
    devices = check_names(name, values)
    matches = [_DEVICE.fullmatch(device.strip()) for device in devices]
    numbers = [match for match in matches if match and match["number"]]
    if not all(matches) or 0 < len(numbers) < len(devices):
        raise InvalidRequestError(
            f"{name}={shown(list(devices))} must name GPUs by their numbers ('0'), or all of them "
            "by UUIDs that begin with GPU- or MIG-"
        )
    known = tuple(str(int(match[0])) if match["number"] else match[0] for match in matches if match)
    # CUDA takes the beginning of a UUID for the whole UUID.
    in_order = sorted(known)
    if any(map(str.__eq__ if numbers else str.startswith, in_order[1:], in_order)):
        raise InvalidRequestError(f"{name}={shown(list(devices))} names a GPU twice")
    return known


def available_gpus(
    gpus: Sequence[str] | None,
    environ: Mapping[str, str] = os.environ,
    ask: Callable[[], list[Gpu]] = ask_nvidia_smi,
) -> list[Gpu]:
    """Return the GPUs to share out.

    They are ``gpus`` if given, else those of ``CUDA_VISIBLE_DEVICES``, else those of nvidia-smi.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is None and visible is None:
        return ask()
    # For CUDA, no device is visible from the first invalid entry on: "-1" hides all.
    named = takewhile(_DEVICE.fullmatch, map(str.strip, str(visible).split(",")))
    devices = gpus if gpus is not None else check_devices("CUDA_VISIBLE_DEVICES", list(named))
    models = {gpu.device: gpu.model for gpu in ask()} if devices else {}
    return [Gpu(device, models.get(device, "")) for device in devices]


def share_out(
    request: str | None, n_replicas: int, gpus: Callable[[], Sequence[Gpu]]
) -> list[str | None]:
    """Return ``CUDA_VISIBLE_DEVICES`` for each replica: disjoint, or None for no change.

    Args:
        request: The launch's ``gpu`` argument; a model is found by any part of its name in
            nvidia-smi's list.
        n_replicas: Number of replicas, each of which gets the requested number of GPUs.
        gpus: Called only when GPUs are asked for.

    Raises:
        InvalidRequestError: Bad request, unknown model, too few GPUs, or several slices of GPUs for
            one replica.
    """
    if request is None:
        return [None] * n_replicas
    wanted = parse_gpu(request)
    count = wanted.count
    present = list(gpus())
    fitting = [
        gpu for gpu in present if wanted.name == ANY or wanted.name.lower() in gpu.model.lower()
    ]
    if len(fitting) < n_replicas * count:
        known = (
            ", ".join(f"{gpu.device} ({gpu.model or 'model unknown'})" for gpu in present) or "none"
        )
        raise InvalidRequestError(
            f"gpu={shown(request)} for {n_replicas} replica(s) needs {n_replicas * count} GPU(s), "
            f"and this machine offers {len(fitting)} of them. Its GPUs are: {known}. Ask for "
            "fewer, ask for 'any:N', name them with gpus=[...] in the constructor, or leave gpu "
            "out, so that the replicas share what CUDA_VISIBLE_DEVICES shows"
        )
    devices = [gpu.device for gpu in fitting]
    if count > 1 and (slices := [name for name in devices if name.startswith("MIG-")]):
        raise InvalidRequestError(
            f"gpu={shown(request)}: CUDA shows a process one slice of a GPU at most, such as "
            f"{slices[0]}: ask for one per replica"
        )
    return [",".join(devices[k * count : (k + 1) * count]) for k in range(n_replicas)]
