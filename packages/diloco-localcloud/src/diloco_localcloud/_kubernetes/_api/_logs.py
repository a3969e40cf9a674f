"""The answer to a GET of a pod's log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..._server._http import Request, Response
from .._control._cluster import Cluster
from .._control._runtime import Log
from .._objects import _refusals, _resources
from .._pods import _facts
from ._query import whole
from ._route import Route

Json = dict[str, Any]

_LOOK_SECONDS = 0.2
_PIECE_ENTRIES = 64  # each of at most 16 KiB
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")


@dataclass(frozen=True)
class Window:
    """The part of a log that a request asks for."""

    tail: int | None = None
    since: float | None = None  # seconds since the epoch
    limit: int | None = None  # bytes
    timestamps: bool = False

    def first(self, log: Log) -> int:
        """Return the number of the first entry to show."""
        times = log.times()
        start = 0
        if self.since is not None:
            since = self.since
            start = next(
                (place for place, moment in enumerate(times) if moment >= since), len(times)
            )
        if self.tail is not None:
            start = max(start, len(times) - self.tail)
        return start

    def show(self, entries: list[tuple[float, bytes]], *, begun: bool) -> bytes:
        """Return the text of these entries.

        ``begun`` says that the entry before the first one was part of the same line. As in the
        source of the kubelet, a time stands before the first entry of each line shown here.
        """
        text = []
        for moment, entry in entries:
            if self.timestamps and not begun:
                text.append(_stamp(moment).encode() + b" ")
            text.append(entry)
            begun = not entry.endswith(b"\n")
        return b"".join(text)


def _stamp(moment: float) -> str:
    """Return seconds since the epoch as a time with nine digits of a second, as in logs."""
    whole = datetime.fromtimestamp(moment, UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%S.") + f"{whole.microsecond:06d}000Z"


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
        window = _window(request, cluster.timeline.now())
        start = window.first(log)
        end = None if request.flag("follow") else len(log.times())
        return Response(200, _pieces(cluster, log, window, start, end), "text/plain")


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


def _window(request: Request, now: float) -> Window:
    query = request.query
    back = whole(query, "sinceSeconds")
    since = None if back is None else now - back
    tail, limit = whole(query, "tailLines"), whole(query, "limitBytes")
    return Window(tail, since, limit, timestamps=request.flag("timestamps"))


def _pieces(
    cluster: Cluster, log: Log, window: Window, start: int, end: int | None
) -> Iterator[bytes]:
    """Yield the entries up to ``end``, or all until the container has ended, in small pieces."""
    left, begun = window.limit, False
    while (end is None or start < end) and (left is None or left > 0):
        upto = start + _PIECE_ENTRIES
        with cluster.changed:
            fresh = log.entries(start, upto if end is None else min(upto, end))
            if not fresh:
                if end is not None or log.ended or cluster.stopped:
                    return
                cluster.changed.wait(_LOOK_SECONDS)
                continue
        start += len(fresh)
        text = window.show(fresh, begun=begun)
        begun = not fresh[-1][1].endswith(b"\n")
        if left is not None:
            text, left = text[:left], left - len(text)
        yield text
