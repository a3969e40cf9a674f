"""Reading what an entrypoint returned."""

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

from ._client import pieces
from ._cluster import Cluster
from ._errors import MissingError, NoLogError
from ._facts import PodFacts, log_is_gone
from ._lines import lines_of, written
from ._verdict import is_damaged, read_message

# Lines that something else may write behind the result, without the whole log being read.
_SLACK = 50


def read_result(
    cluster: Cluster,
    handle: ReplicaHandle,
    seen: PodFacts | None,
    pods: Callable[[], list[PodFacts]],
) -> Any:
    """The result of a replica that has succeeded: from its termination message, or from its log if that was too small.

    Args:
        cluster: To ask.
        handle: The replica.
        seen: Its pod, if it was seen.
        pods: Lists its pods, the newest last.

    Raises:
        ResultLostError: It succeeded, but its result is gone: the cluster itself says so.
        NoLogError: Its node says that it has no log, and its pod is there.
        BackendError: The cluster could not be asked.
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
    if is_damaged(pod):
        raise ResultLostError(f"{name}, but what its runner reported cannot be read")
    if report is None:
        raise ResultLostError(
            f"{name}, but its container reported no result: command= must end with what starts "
            "diloco_protocol.runner, and the image must have this version of diloco-protocol"
        )
    if not report.result_lines:
        return report.outcome.result
    what = f"read the log of pod {pod.name}"
    lost = f"{name}, but its result, which is in its log, cannot be read"

    def read(tail: int | None) -> Any:
        try:
            log = cluster.open_log(
                handle.metadata["namespace"], pod.name, endless=False, tail_lines=tail
            )
        except MissingError as error:
            raise ResultLostError(f"{lost}: {error}") from error
        lines = written(lines_of(pieces(what, log)), lambda: log_is_gone(pod.name, pods()))
        try:
            # A log without a line of the replica, which has written some, proves nothing: it may be
            # a proxy's.
            if (first := next(lines, None)) is None:
                raise UnavailableError(f"cannot {what}: the answer is empty")
            return result_from_lines(report, (line.text for line in chain([first], lines)))
        except (InvalidRequestError, MissingError) as error:
            if tail is not None and isinstance(error, InvalidRequestError):
                return read(None)  # something else may have written more behind the runner
            raise ResultLostError(f"{lost}: {error}") from error
        except NoLogError as error:
            raise NoLogError(f"{lost}: {error}") from error

    return read(report.result_lines + _SLACK)
