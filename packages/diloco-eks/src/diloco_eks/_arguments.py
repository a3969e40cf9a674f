"""Large arguments: a ConfigMap of the run holds them, so that not every pod repeats them in every list of pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diloco_protocol import InvalidRequestError, UnavailableError, retry, spec_to_environment

from . import _names as names
from ._errors import ConflictError
from ._namespace import DEFAULT

if TYPE_CHECKING:
    from diloco_protocol import Backoff, ReplicaSpec, RunRequest

    from ._cluster import Cluster
    from ._facts import JobFacts
    from ._options import EKSOptions

# Encoded bytes up to which the arguments stand in the Job itself. Each pod repeats them: 600 kB on 8 ranks made lists of 6 MB.
_MOST_INSIDE = 64 * 1024
_MOST_BYTES = 1024 * 1024  # of a ConfigMap's data


def spec_entries(spec: ReplicaSpec, job: str) -> list[dict[str, Any]]:
    """The spec as entries of a container's ``env``: its pieces, or where they are.

    Raises:
        InvalidRequestError: They are too large for a ConfigMap.
    """
    pieces = spec_to_environment(spec)
    if not _is_large(pieces):
        return [{"name": name, "value": piece} for name, piece in pieces.items()]
    size = sum(map(len, pieces.values()))
    if size > _MOST_BYTES:
        raise InvalidRequestError(
            f"the arguments are {size} bytes when they are encoded, and a ConfigMap holds {_MOST_BYTES}: put large arguments "
            "into the store and pass their address"
        )
    return [
        {"name": key, "valueFrom": {"configMapKeyRef": {"name": _name(job), "key": key}}}
        for key in pieces
    ]


def arguments_map(request: RunRequest, options: EKSOptions) -> dict[str, Any] | None:
    """The ConfigMap of a run's arguments; None if they stand in the Job."""
    pieces = spec_to_environment(request.specs(grace=options.grace)[0])
    if not _is_large(pieces):
        return None
    labels = {names.MANAGED_BY: names.MANAGER, names.RUN: request.run_id}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": _name(request.run_id),
            "namespace": options.namespace or DEFAULT,
            "labels": labels,
        },
        "immutable": True,
        "data": pieces,
    }


def put_arguments(
    cluster: Cluster, body: Mapping[str, Any], job: JobFacts, backoff: Backoff, patience: float
) -> None:
    """Create the ConfigMap of a Job, which owns it: it goes when the Job goes. The pods wait for it. Repeatable.

    Raises:
        BackendError: It was not created.
    """
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.name, "uid": job.uid}
    owned = {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}
    space, name = body["metadata"]["namespace"], body["metadata"]["name"]

    def once() -> None:
        try:
            cluster.create_config_map(owned)
        except ConflictError as error:
            known = cluster.read_config_map(space, name)
            owners = known["metadata"].get("ownerReferences") or []
            if all(each.get("uid") != job.uid for each in owners):
                # An earlier run had the name, and the cluster is about to remove what belonged to it.
                raise UnavailableError(
                    f"cannot create ConfigMap {space}/{name}: {error}"
                ) from error

    retry(once, backoff, timeout=patience)


def _is_large(pieces: Mapping[str, str]) -> bool:
    return sum(map(len, pieces.values())) > _MOST_INSIDE


def _name(job: str) -> str:
    return f"{job}-arguments"
