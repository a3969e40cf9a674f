"""Large arguments of a run, which a ConfigMap holds.

Otherwise every pod would repeat them in every list of pods. Every account that may create
ConfigMaps can put one in the place of ours. So the name contains the digest of what we wrote, and
the pod's own arguments tell it to the runner, which refuses any other content before it decodes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco_protocol import InvalidRequestError, spec_to_environment
from diloco_protocol.backend import redact_spec, spec_sha256

from . import _names as names

if TYPE_CHECKING:
    from diloco_protocol import RunRequest

    from ._options import EKSOptions

# Up to this many encoded bytes, the arguments are in the Job itself. Each pod repeats them: 600 kB
# on 8 ranks made lists of 6 MB.
_MOST_INSIDE = 64 * 1024
_MOST_BYTES = 1024 * 1024  # of the data in a ConfigMap


def encoded_spec(
    request: RunRequest, options: EKSOptions, *, shown: bool = False
) -> tuple[dict[str, str], str | None]:
    """Return the spec as variables, and their digest if a ConfigMap will hold them.

    Args:
        request: The launch.
        options: The executor's options.
        shown: Whether to leave secrets out of the variables, for a plan; they are encoded, so this
            cannot be done later.

    Raises:
        InvalidRequestError: The arguments are too large for a ConfigMap.
    """
    spec = request.specs(grace=options.grace)[0]
    pieces = spec_to_environment(spec)
    shown_pieces = spec_to_environment(redact_spec(spec)) if shown else None
    if sum(map(len, pieces.values())) <= _MOST_INSIDE:
        return shown_pieces or pieces, None
    # The same launch must find the same ConfigMap, whatever the order of the keys.
    sorted_kwargs = json.loads(json.dumps(spec.kwargs, sort_keys=True))
    pieces = spec_to_environment(replace(spec, kwargs=sorted_kwargs))
    size = sum(map(len, pieces.values()))
    if size > _MOST_BYTES:
        raise InvalidRequestError(
            f"the arguments are {size} bytes when they are encoded, and a ConfigMap holds "
            f"{_MOST_BYTES}: put large arguments into the store and pass their address"
        )
    return shown_pieces or pieces, spec_sha256(pieces)


def spec_entries(job: str, pieces: Mapping[str, str], digest: str | None) -> list[dict[str, Any]]:
    """Return the spec as entries of a container's ``env``: its pieces, or references to them."""
    if digest is None:
        return [{"name": name, "value": piece} for name, piece in pieces.items()]
    name = map_name(job, digest)
    return [
        {"name": key, "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}
        for key in pieces
    ]


def map_name(job: str, digest: str = "") -> str:
    """Return the name of a run's ConfigMap; without a digest, only its beginning."""
    return f"{job}-arguments-{digest[:16]}"


def arguments_map(
    request: RunRequest, options: EKSOptions, *, shown: bool = False
) -> dict[str, Any] | None:
    """Return the ConfigMap of a run's arguments; None if the arguments are in the Job."""
    pieces, digest = encoded_spec(request, options, shown=shown)
    if digest is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": map_name(request.run_id, digest),
            "namespace": options.namespace or names.DEFAULT,
            "labels": {names.MANAGED_BY: names.MANAGER, names.RUN: request.run_id},
        },
        "immutable": True,
        "data": pieces,
    }
