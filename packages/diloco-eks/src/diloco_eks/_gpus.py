"""GPUs by name: how many, and on which nodes they are, whoever made the node."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import ANY, parse_gpu

KARPENTER = "karpenter.k8s.aws/instance-gpu-name"
AUTO_MODE = "eks.amazonaws.com/instance-gpu-name"
FEATURE_DISCOVERY = "nvidia.com/gpu.product"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
KARPENTER_CAPACITY = "karpenter.sh/capacity-type"
NODE_GROUP_CAPACITY = "eks.amazonaws.com/capacityType"

_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_MOST_GPUS = 16  # of one node, where the model is not known
Table = Mapping[str, Mapping[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of GPU on AWS.

    Attributes:
        name: In Karpenter's and Auto Mode's label.
        products: In the label of NVIDIA's GPU feature discovery.
        types: Instance type → GPUs of one node. EKS user guide, "ml-workload-placement"; EC2 instance types.
    """

    name: str
    products: tuple[str, ...]
    types: Mapping[str, int]


def _sizes(family: str, counts: Mapping[int, str]) -> dict[str, int]:
    return {f"{family}.{size}": count for count, sizes in counts.items() for size in sizes.split()}


_SMALL = {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}
MODELS: Mapping[str, Model] = {
    "T4": Model(
        "t4",
        ("Tesla-T4",),
        _sizes("g4dn", {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge", 8: "metal"}),
    ),
    "V100": Model(
        "v100",
        ("Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-32GB"),
        {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8, "p3dn.24xlarge": 8},
    ),
    "A10G": Model("a10g", ("NVIDIA-A10G",), _sizes("g5", _SMALL)),
    "L4": Model("l4", ("NVIDIA-L4",), _sizes("g6", _SMALL)),
    "L40S": Model("l40s", ("NVIDIA-L40S",), _sizes("g6e", _SMALL)),
    "A100": Model(
        "a100",
        ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"),
        {"p4d.24xlarge": 8, "p4de.24xlarge": 8},
    ),
    "A100-80GB": Model("a100", ("NVIDIA-A100-SXM4-80GB",), {"p4de.24xlarge": 8}),
    "H100": Model("h100", ("NVIDIA-H100-80GB-HBM3",), {"p5.4xlarge": 1, "p5.48xlarge": 8}),
    "H200": Model("h200", ("NVIDIA-H200",), {"p5e.48xlarge": 8, "p5en.48xlarge": 8}),
    "B200": Model("b200", ("NVIDIA-B200",), {"p6-b200.48xlarge": 8}),
    "B300": Model("b300", ("NVIDIA-B300",), {"p6-b300.48xlarge": 8}),
}
# The one Karpenter label that does not tell its variants apart: there only the instance types do.
_AMBIGUOUS = frozenset({"A100-80GB"})


@dataclass(frozen=True, slots=True)
class PlacedGpus:
    """The GPUs of one replica, and where they are.

    Attributes:
        name: The model, or ``"any"``.
        count: How many.
        places: Label → values; a node with any of these labels has the model. Empty for any node.
    """

    name: str
    count: int
    places: Mapping[str, tuple[str, ...]]


def check_table(table: Table | None) -> dict[str, dict[str, tuple[str, ...]]]:
    """A caller's own table of GPUs: name → node label → values of which one must match.

    Raises:
        InvalidRequestError: It is not such a table.
    """
    checked: dict[str, dict[str, tuple[str, ...]]] = {}
    if table is not None and not isinstance(table, Mapping):
        raise InvalidRequestError(
            f"gpu_types must map names of GPUs to node labels and their values, not {table!r}"
        )
    for name, places in (table or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() == ANY:
            raise InvalidRequestError(
                f"gpu_types has the name {name!r}: letters, digits, '-', '_' and '.' are allowed"
            )
        if not isinstance(places, Mapping) or not places:
            raise InvalidRequestError(
                f"gpu_types[{name!r}] must map node labels to lists of values, not {places!r}"
            )
        for label, values in places.items():
            if (
                isinstance(values, str)
                or not isinstance(values, Collection)
                or not values
                or not all(isinstance(value, str) for value in values)
            ):
                raise InvalidRequestError(
                    f"gpu_types[{name!r}][{label!r}] must be a list of the label's values, not {values!r}"
                )
        checked[name.upper()] = {label: tuple(values) for label, values in places.items()}
    return checked


def place_gpus(text: str, table: Table | None = None) -> PlacedGpus:
    """What ``gpu=`` asks for (see :func:`diloco_protocol.backend.parse_gpu`), and the nodes that have it.

    Args:
        text: What was asked for; names in any case.
        table: The caller's own table, by upper-case name; it wins over ours.

    Raises:
        InvalidRequestError: The text has another form, the name is unknown (lists the known ones), or no node has so many.
    """
    table = table or {}
    wanted = parse_gpu(text)
    name, count = wanted.name.upper(), wanted.count
    most = _MOST_GPUS
    places: Mapping[str, tuple[str, ...]] = {}
    if name in table:
        places = {label: tuple(values) for label, values in table[name].items()}
    elif name in MODELS:
        model = MODELS[name]
        most = max(model.types.values())
        places = _places(name, model, count)
    elif wanted.name != ANY:
        known = ", ".join([*sorted({*MODELS, *table}), ANY])
        raise InvalidRequestError(
            f"gpu={text!r}: there is no GPU {wanted.name!r}; known are {known}; gpu_types= adds others"
        )
    if count > most:
        raise InvalidRequestError(
            f"gpu={text!r}: a node has at most {most} of these, and a replica runs on one node"
        )
    return PlacedGpus(ANY if wanted.name == ANY else name, count, places)


def _places(name: str, model: Model, count: int) -> dict[str, tuple[str, ...]]:
    fitting = [kind for kind, gpus in model.types.items() if gpus >= count]
    # HyperPod's nodes carry SageMaker's spelling.
    types = tuple(spelling for kind in fitting for spelling in (kind, f"ml.{kind}"))
    named = {} if name in _AMBIGUOUS else {KARPENTER: (model.name,), AUTO_MODE: (model.name,)}
    return {**named, FEATURE_DISCOVERY: model.products, INSTANCE_TYPE: types}


def node_affinity(
    places: Mapping[str, tuple[str, ...]], *, spot: bool | None, chosen: Mapping[str, str]
) -> dict[str, Any] | None:
    """The required node affinity, or None if any node will do.

    Nodes are labelled by whoever made them (Karpenter, Auto Mode, NVIDIA's discovery, a node group), so the terms are
    OR-ed: one that matches is enough.

    Args:
        places: Label → values; see :class:`PlacedGpus`.
        spot: True for interruptible capacity, False for any other, None for whatever there is.
        chosen: The caller's node selector. Where it speaks of the model or the capacity itself, we do not.
    """
    kinds: list[list[dict[str, Any]]] = [[]]
    if places and not chosen.keys() & places.keys():
        kinds = [[_expression(label, values)] for label, values in places.items()]
    capacities: list[list[dict[str, Any]]] = [[]]
    if spot is not None and not chosen.keys() & {KARPENTER_CAPACITY, NODE_GROUP_CAPACITY}:
        labels = ((KARPENTER_CAPACITY, ("spot",)), (NODE_GROUP_CAPACITY, ("SPOT",)))
        if spot:
            capacities = [[_expression(label, values)] for label, values in labels]
        else:  # also on nodes that have neither label
            capacities = [[_expression(label, values, "NotIn") for label, values in labels]]
    terms = [
        {"matchExpressions": [*kind, *capacity]} for kind, capacity in product(kinds, capacities)
    ]
    if terms == [{"matchExpressions": []}]:
        return None
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }


def _expression(label: str, values: Sequence[str], operator: str = "In") -> dict[str, Any]:
    return {"key": label, "operator": operator, "values": list(values)}
