"""The payload of a call: JSON values, with a version."""

from __future__ import annotations

import json
from typing import Any

from diloco_protocol import InvalidRequestError, RunRequest

from ._options import ModalOptions

PAYLOAD_VERSION = 2
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
MAX_RESULT_BYTES = 16 * 1024 * 1024
MARGIN = 120.0
"""Seconds that a call may last longer than its replica: to start the runner, and to report."""
LONGEST_CALL = 86_400.0
"""The longest time of a call in seconds, which is Modal's own limit."""


def payloads(
    request: RunRequest,
    options: ModalOptions,
    launch: str = "",
    start_by: float = 0.0,
    environment: str | None = None,
) -> list[dict[str, Any]]:
    """Make the payloads of the calls of a launch, in rank order.

    Args:
        request: The launch.
        options: The options of the executor.
        launch: Id of this launch among those of its run_id, so that a call left over from another
            launch trains nothing; empty before there is one.
        environment: The environment of the record; if it is not known yet, that of the options is
            used.
        start_by: Unix seconds after which a replica must not begin; 0 before it is launched.

    Raises:
        InvalidRequestError: One of them is too large.
    """
    made = []
    for spec in request.specs(grace=options.grace):
        payload = {
            "version": PAYLOAD_VERSION,
            "spec": spec.to_json(),
            "rank": spec.rank,
            "record": record_name(request.run_id),
            "launch": launch,
            "environment_name": environment or options.environment_name,
            "env": dict(request.env),
            "secrets": dict(request.secrets),
            "restarts": request.max_restarts,
            "result_bytes": MAX_RESULT_BYTES,
            "grace": options.grace,
            "pending_timeout": options.pending_timeout,
            "start_by": start_by,
            "deploy": deploy_command(options),
        }
        # The labels are in the record, and would make it too large to be read.
        size = len(json.dumps([payload, dict(request.labels)]).encode())
        if size > MAX_PAYLOAD_BYTES:
            raise InvalidRequestError(
                f"the arguments, variables and labels of a replica have {size} bytes as JSON, and "
                f"{MAX_PAYLOAD_BYTES} are allowed: put what is large into a bucket, and pass its "
                "URI"
            )
        made.append(payload)
    return made


def record_name(run_id: str) -> str:
    """Return the name of the Dict of a run."""
    return f"diloco-{run_id}"


def deploy_command(options: ModalOptions) -> str:
    """Return the command that deploys the app, for messages."""
    where = f" --env {options.environment_name}" if options.environment_name else ""
    return (
        f"modal deploy{where} my_app.py, where my_app.py says: "
        f"app = diloco_modal.build_app({options.app!r}, function={options.function!r}, image=...)"
    )


def call_timeout(request: RunRequest, grace: float) -> float:
    """Return the seconds until Modal itself ends a call, a backstop behind the runner's timeout."""
    attempts = 1 + request.max_restarts
    return (request.timeout or LONGEST_CALL) * attempts + grace * attempts + MARGIN
