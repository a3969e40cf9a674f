"""The GPUs of instance types, by model and number."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import ANY, parse_gpu


def _sizes(family: str, counts: Mapping[int, str]) -> dict[str, int]:
    return {
        f"ml.{family}.{size}": count for count, sizes in counts.items() for size in sizes.split()
    }


_SMALL = {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}

#: Model → instance type → GPUs of one instance, from the smallest to the largest.
#: https://aws.amazon.com/ec2/instance-types/
MODELS: Mapping[str, Mapping[str, int]] = {
    "V100": {"ml.p3.2xlarge": 1, "ml.p3.8xlarge": 4, "ml.p3.16xlarge": 8, "ml.p3dn.24xlarge": 8},
    "T4": _sizes("g4dn", {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge"}),
    "A10G": _sizes("g5", _SMALL),
    "L4": _sizes("g6", _SMALL),
    "L40S": _sizes("g6e", _SMALL),
    "A100": {"ml.p4d.24xlarge": 8, "ml.p4de.24xlarge": 8},
    "A100-80GB": {"ml.p4de.24xlarge": 8},
    "H100": {"ml.p5.4xlarge": 1, "ml.p5.48xlarge": 8},
    "H200": {"ml.p5e.48xlarge": 8, "ml.p5en.48xlarge": 8},
    "B200": {"ml.p6-b200.48xlarge": 8},
    "B300": {"ml.p6-b300.48xlarge": 8},
    "GB200": {"ml.p6e-gb200.36xlarge": 4},
    "RTX-PRO-6000": _sizes(
        "g7e", {1: "2xlarge 4xlarge 8xlarge", 2: "12xlarge", 4: "24xlarge", 8: "48xlarge"}
    ),
    "TRAINIUM": {"ml.trn1.2xlarge": 1, "ml.trn1.32xlarge": 16, "ml.trn1n.32xlarge": 16},
    "TRAINIUM2": {"ml.trn2.48xlarge": 16},
}

# Their storage is local and of fixed size, so a request must not ask for a volume.
_LOCAL_STORAGE = frozenset({
    "g4dn", "g5", "g6", "g6e", "g7", "g7e", "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200",
    "p6-b300", "p6e-gb200", "r5d", "trn1", "trn1n", "trn2",
})  # fmt: skip


def choose_instance(gpu: str | None, *, gpu_type: str, cpu_type: str) -> str:
    """Return the smallest instance type that has what ``gpu=`` asks for.

    Args:
        gpu: ``"H100"``, ``"H100:8"``, ``"2"``; an instance type such as ``"ml.g5.12xlarge"``; None
            for no GPU.
        gpu_type: The type for GPUs of any model, if it has enough of them.
        cpu_type: The type where no GPU is asked for.

    Raises:
        InvalidRequestError: There is no such model, or no type with so many GPUs.
    """
    if gpu is None:
        return cpu_type
    wanted = parse_gpu(gpu)
    if wanted.name.lower().startswith("ml."):
        if wanted.count != 1:
            raise InvalidRequestError(
                f"gpu={gpu!r}: an instance type has its number of GPUs; write gpu={wanted.name!r}"
            )
        return wanted.name.lower()
    if wanted.name == ANY:
        types = {kind: count for model in MODELS.values() for kind, count in model.items()}
        if types.get(gpu_type, 0) >= wanted.count:
            return gpu_type
    elif (model := MODELS.get(wanted.name.upper())) is not None:
        types = dict(model)
    else:
        raise InvalidRequestError(
            f"gpu={gpu!r}: there is no GPU {wanted.name!r} on SageMaker; known are "
            f"{', '.join([*sorted(MODELS), ANY])}, and every instance type, such as "
            "'ml.g5.12xlarge'"
        )
    fitting = [kind for kind in sorted(types, key=types.__getitem__) if types[kind] >= wanted.count]
    if not fitting:
        raise InvalidRequestError(
            f"gpu={gpu!r}: an instance has at most {max(types.values())} of these, and a replica "
            "runs on one instance"
        )
    return fitting[0]


def has_local_storage(instance_type: str) -> bool:
    """Return whether the storage of a type is fixed, so that no volume can be asked for."""
    return instance_type.removeprefix("ml.").partition(".")[0] in _LOCAL_STORAGE
