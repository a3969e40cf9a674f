"""Reading an entrypoint's result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from diloco_protocol import (
    InvalidRequestError,
    ReplicaHandle,
    ResultLostError,
    UnavailableError,
    result_from_lines,
)

from .._client._client import pieces
from .._client._cluster import Cluster
from .._client._errors import MissingError, NoLogError
from .._state._facts import PodFacts, log_is_gone
from .._state._verdict import is_damaged, read_message
from ._lines import lines_of, written

# Number of lines that another program may write behind the result; if there are more, the whole log
# is read.
_SLACK = 50


def read_result(
    cluster: Cluster,
    handle: ReplicaHandle,
    seen: PodFacts | None,
    pods: Callable[[], list[PodFacts]],
) -> Any:
    """Return the result of a replica that has succeeded.

    It is in the termination message, or in the log if there was not enough room.

    Args:
        cluster: The cluster.
        handle: The replica.
        seen: The replica's pod, if it was seen.
        pods: Lists the replica's pods, the newest last.

    Raises:
        ResultLostError: The replica succeeded, but its result is gone, as the cluster itself says.
        NoLogError: The replica's node says that it has no log, although the pod exists.
        BackendError: The cluster could not be queried.
    """
    pod = seen or next((pod for pod in reversed(pods()) if pod.phase == "Succeeded"), None)
    name = f"rank {handle.rank} of run {handle.run_id!r} succeeded"
    if pod is None:
        raise ResultLostError(
            f"{name}, but its pod has been removed, and its result with it (Kubernetes removes the "
            "pods of a node that goes away). To keep results, collect during the run with an "
            "executor that has a journal="
        )
    report = read_message(pod)
    if report is None:
        why = (
            "what its runner reported cannot be read"
            if is_damaged(pod)
            else "its container reported no result: command= must end with what starts "
            "diloco_protocol.runner, and the image must have this version of diloco-protocol"
        )
        raise ResultLostError(f"{name}, but {why}")
    if not report.result_lines:
        return report.outcome.result
    what = f"read the log of pod {pod.name}"
    lost = f"{name}, but its result, which is in its log, cannot be read"

    def read(tail: int | None) -> Any:
        try:
            log = cluster.open_log(handle.metadata["namespace"], pod.name, endless=False, tail=tail)
        except MissingError as error:
            raise ResultLostError(f"{lost}: {error}") from error
        lines = written(lines_of(pieces(what, log)), lambda: log_is_gone(pod.name, pods()))
        try:
            # A log without any line of the replica, which has written some, proves nothing: it may
            # come from a proxy.
            if (first := next(lines, None)) is None:
                raise UnavailableError(f"cannot {what}: the answer is empty")
            return result_from_lines(report, (line.text for line in chain([first], lines)))
        except (InvalidRequestError, MissingError) as error:
            if tail is not None and isinstance(error, InvalidRequestError):
                return read(None)  # another program may have written more lines behind the runner's
            raise ResultLostError(f"{lost}: {error}") from error
        except NoLogError as error:
            raise NoLogError(f"{lost}: {error}") from error

    return read(report.result_lines + _SLACK)
