"""GET of a pod's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._server import _timeline
from ..._server._http import Response
from .._objects import _refusals, _resources
from .._pods import _facts
from ._log_window import Window
from ._numbers import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..._server._http import Request
    from .._control._cluster import Cluster
    from .._control._runtime import Log
    from ._route import Route

Json = dict[str, Any]

_LOOK_SECONDS = 0.2
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")


def serve(cluster: Cluster, request: Request, route: Route) -> Response:
    """Answer; ``follow`` streams until the container has ended.

    Raises:
        ApiError: 404, or 400 with the words of the kubelet.
    """
    with cluster.changed:
        pod = cluster.store.get(_resources.PODS, route.namespace, route.name)
        container = container_of(pod, request.query.get("container", ""))
        life = _life(pod, container, previous=request.flag("previous"))
        if life is None:
            return Response(200, b"", "text/plain")
        log = cluster.runtime.log_of(pod, container, life)
        window = _window(request, cluster.timeline.now())
        start = window.first(log)
        if request.flag("follow"):
            return Response(200, _follow(cluster, log, window, start), "text/plain")
        text = window.show(log.lines(start))
        return Response(200, text if window.limit is None else text[: window.limit], "text/plain")


def container_of(pod: Json, name: str) -> str:
    """The name of the container that is meant by ``name``, which may be "".

    Raises:
        ApiError: 400, there is none of this name, or several without one.
    """
    known = [container["name"] for container in pod["spec"]["containers"]]
    where = pod["metadata"]["name"]
    if not name and len(known) > 1:
        raise _refusals.bad_request(
            f"a container name must be specified for pod {where}, choose one of: [{' '.join(known)}]"
        )
    if name and name not in known:
        raise _refusals.bad_request(f"container {name} is not valid for pod {where}")
    return name or known[0]


def _life(pod: Json, container: str, *, previous: bool) -> int | None:
    """The number of the container's life; None for a pod that no kubelet has yet."""
    where = pod["metadata"]["name"]
    status = _facts.container_status(pod, container)
    if previous:
        if not status.get("restartCount"):
            raise _refusals.bad_request(
                f'previous terminated container "{container}" in pod "{where}" not found'
            )
        return int(status["restartCount"]) - 1
    if not status:
        return None
    waiting = status["state"].get("waiting")
    if waiting:
        reason = waiting["reason"]
        why = "image can't be pulled" if reason in _PULLING else reason
        raise _refusals.bad_request(
            f'container "{container}" in pod "{where}" is waiting to start: {why}'
        )
    return int(status["restartCount"])


def _window(request: Request, now: float) -> Window:
    query = request.query
    back = whole(query, "sinceSeconds")
    since = None if back is None else now - back
    if query.get("sinceTime"):
        try:
            since = _timeline.seconds(query["sinceTime"])
        except (ValueError, OverflowError) as wrong:
            raise _refusals.bad_request(f"sinceTime: {wrong}") from None
    tail, limit = whole(query, "tailLines"), whole(query, "limitBytes")
    return Window(tail, since, limit, timestamps=request.flag("timestamps"))


def _follow(cluster: Cluster, log: Log, window: Window, start: int) -> Iterator[bytes]:
    left = window.limit
    while True:
        with cluster.changed:
            fresh = log.lines(start)
            done = log.ended or cluster.stopped
            if not fresh and not done:
                cluster.changed.wait(_LOOK_SECONDS)
                continue
        start += len(fresh)
        text = window.show(fresh)
        if left is not None:
            text, left = text[:left], left - len(text)
        if text:
            yield text
        if (done and not fresh) or (left is not None and left <= 0):
            return
