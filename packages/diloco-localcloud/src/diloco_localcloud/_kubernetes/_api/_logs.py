"""The answer to a GET of a pod's log."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from ..._server._http import Request, Response
from .._control._cluster import Cluster
from .._control._runtime import Log
from .._objects import _refusals, _resources
from .._pods import _facts
from ._access import Route
from ._query import whole

Json = dict[str, Any]

_LOOK_SECONDS = 0.2
_PIECE_ENTRIES = 64  # each of at most 16 KiB
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")


def serve(cluster: Cluster, request: Request, route: Route) -> Response:
    """Answer in pieces; with ``follow`` until the container has ended.

    Raises:
        ApiError: 404, or 400 with the words of the kubelet.
    """
    for option in ("sinceTime", "previous"):
        if request.query.get(option) not in (None, "", "false"):
            raise _refusals.bad_request(f"the stand-in does not serve {option} of a log")
    with cluster.changed:
        pod = cluster.store.get(_resources.PODS, route.namespace, route.name)
        container = container_of(pod, request.query.get("container", ""))
        if not _facts.container_status(pod, container):  # no kubelet has it yet
            return Response(200, b"", "text/plain")
        _check_begun(pod, container)
        gone = _taken_away(pod, container)
        if gone is not None:
            return Response(200, gone, "text/plain")
        log = cluster.runtime.log_of(pod, container)
        times, query = log.times(), request.query
        back, tail = whole(query, "sinceSeconds"), whole(query, "tailLines")
        start = 0 if back is None else bisect.bisect_left(times, cluster.timeline.now() - back)
        if tail is not None:
            start = max(start, len(times) - tail)
        end = None if request.flag("follow") else len(times)
        entries = _entries(cluster, log, start, end)
        limit, stamped = whole(query, "limitBytes"), request.flag("timestamps")
        return Response(200, _pieces(entries, limit, stamped=stamped), "text/plain")


def container_of(pod: Json, name: str) -> str:
    """Return the name of the container that ``name``, which may be "", refers to.

    Raises:
        ApiError: 400, there is no such container, or there are several and no name is given.
    """
    known = [container["name"] for container in pod["spec"]["containers"]]
    where = pod["metadata"]["name"]
    if not name and len(known) > 1:
        raise _refusals.bad_request(
            f"a container name must be specified for pod {where}, choose one of: "
            f"[{' '.join(known)}]"
        )
    if name and name not in known:
        raise _refusals.bad_request(f"container {name} is not valid for pod {where}")
    return name or known[0]


def _taken_away(pod: Json, container: str) -> bytes | None:
    """Return the kubelet's observed message for a deleted pod that has ended but still exists.

    It was seen for evicted pods and for pods of a gang that had ended. It was not seen for pods of
    a cancelled Job, but the controller deletes these in the same way, so nothing here tells them
    apart.
    """
    status = _facts.container_status(pod, container)
    identity = status.get("containerID")
    removed = pod["metadata"].get("deletionGracePeriodSeconds") == 0
    if not (removed and identity and "terminated" in status["state"]):
        return None
    return f"unable to retrieve container logs for {identity}".encode()


def _check_begun(pod: Json, container: str) -> None:
    waiting = _facts.container_status(pod, container)["state"].get("waiting")
    if waiting:
        reason = waiting["reason"]
        why = "image can't be pulled" if reason in _PULLING else reason
        raise _refusals.bad_request(
            f'container "{container}" in pod "{pod["metadata"]["name"]}" is waiting to start: {why}'
        )


def _entries(
    cluster: Cluster, log: Log, start: int, end: int | None
) -> Iterator[list[tuple[float, bytes]]]:
    """Yield the entries up to ``end``, or all until the container has ended, a few at a time."""
    while end is None or start < end:
        upto = start + _PIECE_ENTRIES
        with cluster.changed:
            fresh = log.entries(start, upto if end is None else min(upto, end))
            if not fresh:
                if end is not None or log.ended or cluster.stopped:
                    return
                cluster.changed.wait(_LOOK_SECONDS)
        start += len(fresh)
        yield fresh


def _pieces(
    pieces: Iterator[list[tuple[float, bytes]]], left: int | None, *, stamped: bool
) -> Iterator[bytes]:
    """Yield the text of entries, at most ``left`` bytes.

    As in the source of the kubelet, a time stands before the first entry of each line shown here.
    """
    begun = False
    for piece in pieces:
        text = b""
        for moment, entry in piece:
            if stamped and not begun:
                text += _stamp(moment).encode() + b" "
            text += entry
            begun = not entry.endswith(b"\n")
        if left is not None:
            text, left = text[:left], left - len(text)
        yield text
        if left is not None and left <= 0:
            return


def _stamp(moment: float) -> str:
    """Return seconds since the epoch as a time with nine digits of a second, as in logs."""
    whole = datetime.fromtimestamp(moment, UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%S.") + f"{whole.microsecond:06d}000Z"
