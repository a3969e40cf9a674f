"""The environment of a container, with exact values.

Kubernetes must not expand the dollar signs in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import is_reserved

from ._names import FAILURES, IGNORED_FAILURES, secret_reference

#: Earlier attempts of this index, from the pod's annotations; empty for none.
FAILURES_VARIABLE = "DILOCO_EKS_FAILURES"
IGNORED_VARIABLE = "DILOCO_EKS_IGNORED_FAILURES"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"


def escape(value: str) -> str:
    """Return a value in which Kubernetes finds nothing to expand, so that it arrives unchanged.

    Kubernetes would expand ``$(NAME)`` and ``$$``.
    """
    return value.replace("$", "$$")


def container_environment(
    spec: list[dict[str, Any]], env: Mapping[str, str], secrets: Mapping[str, str]
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
    entries += spec
    for name, annotation in ((FAILURES_VARIABLE, FAILURES), (IGNORED_VARIABLE, IGNORED_FAILURES)):
        field = {"fieldPath": f"metadata.annotations['{annotation}']"}
        entries.append({"name": name, "valueFrom": {"fieldRef": field}})
    return entries


def runner_arguments(message_path: str, pieces: Iterable[str], digest: str | None) -> list[str]:
    """Return the runner's arguments, in which Kubernetes fills in the variables.

    Without them the runner would take every variable with the prefix of a spec for a piece of it,
    even one that ``envFrom`` of an overlay adds. So the pieces are named one by one where the pod
    itself has them; where they are elsewhere, the runner is told their digest.

    Args:
        message_path: The file to which the runner reports.
        pieces: Names of the variables that hold the spec, in order.
        digest: Digest of the spec, if it is kept where others may write too.
    """
    named = list(pieces)
    return [
        *(
            [f"--spec-piece={n}/{len(named)}:$({name})" for n, name in enumerate(named)]
            if digest is None
            else [f"--spec-sha256={digest}"]
        ),
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
