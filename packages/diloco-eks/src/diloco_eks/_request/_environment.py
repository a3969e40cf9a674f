"""The environment of a container, with exact values.

Kubernetes must not expand the dollar signs in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diloco_protocol import InvalidRequestError, ReplicaSpec, spec_to_environment
from diloco_protocol.backend import is_reserved, redact_spec

from ._names import FAILURES, IGNORED_FAILURES, secret_reference

#: Earlier attempts of this index, from the pod's annotations; empty for none.
FAILURES_VARIABLE = "DILOCO_EKS_FAILURES"
IGNORED_VARIABLE = "DILOCO_EKS_IGNORED_FAILURES"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
# Of the encoded arguments: every pod repeats them, in every list of pods.
_MOST_BYTES = 256 * 1024


def escape(value: str) -> str:
    """Return a value in which Kubernetes finds nothing to expand, so that it arrives unchanged.

    Kubernetes would expand ``$(NAME)`` and ``$$``.
    """
    return value.replace("$", "$$")


def spec_variables(spec: ReplicaSpec, *, shown: bool = False) -> dict[str, str]:
    """Return a spec as variables.

    Args:
        spec: The spec.
        shown: Whether to leave secrets out of the variables, for a plan; they are encoded, so this
            cannot be done later.

    Raises:
        InvalidRequestError: The arguments are too large.
    """
    variables = spec_to_environment(spec)
    size = sum(map(len, variables.values()))
    if size > _MOST_BYTES:
        raise InvalidRequestError(
            f"the arguments are {size} bytes when they are encoded, and a pod may carry "
            f"{_MOST_BYTES}: put large arguments into the store and pass their address"
        )
    return spec_to_environment(redact_spec(spec)) if shown else variables


def container_environment(
    spec: Mapping[str, str], env: Mapping[str, str], secrets: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the container's ``env``.

    It has the caller's variables, references to secrets, the spec, and the number of the attempt.

    Raises:
        InvalidRequestError: A name is taken, a value is too large, or a reference has the wrong
            form.
    """
    entries: list[dict[str, Any]] = []
    for name, value in env.items():
        check_free(name)
        entries.append({"name": name, "value": escape(value)})
    for name, reference in secrets.items():
        check_free(name)
        entries.append(
            {"name": name, "valueFrom": {"secretKeyRef": secret_reference(name, reference)}}
        )
    entries += [{"name": name, "value": piece} for name, piece in spec.items()]
    for name, annotation in ((FAILURES_VARIABLE, FAILURES), (IGNORED_VARIABLE, IGNORED_FAILURES)):
        field = {"fieldPath": f"metadata.annotations['{annotation}']"}
        entries.append({"name": name, "valueFrom": {"fieldRef": field}})
    return entries


def runner_arguments(message_path: str, pieces: Iterable[str]) -> list[str]:
    """Return the runner's arguments, in which Kubernetes fills in the variables.

    Without them the runner would take every variable with the prefix of a spec for a piece of it,
    even one that ``envFrom`` of an overlay adds. So the pieces are named one by one.

    Args:
        message_path: The file to which the runner reports.
        pieces: Names of the variables that hold the spec, in order.
    """
    named = list(pieces)
    return [
        *(f"--spec-piece={n}/{len(named)}:$({name})" for n, name in enumerate(named)),
        f"--index=$({INDEX_VARIABLE})",
        f"--failed=$({FAILURES_VARIABLE})",
        f"--failed=$({IGNORED_VARIABLE})",
        "--message",
        message_path,
    ]


def check_free(name: str) -> None:
    """Refuse a variable that tells a replica its rank, or how often it has failed.

    Raises:
        InvalidRequestError: The launch or the Job controller sets the variable.
    """
    if name in {FAILURES_VARIABLE, IGNORED_VARIABLE, INDEX_VARIABLE} or is_reserved(name):
        raise InvalidRequestError(
            f"{name} may not be set: the launch or the Job controller sets it for every replica"
        )
