"""Tables, in the form that kubectl asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..._server import _timeline
from ..._server._http import Request
from .._jobs import _status
from .._objects._resources import Resource
from .._pods import _facts

Json = dict[str, Any]


def wanted(request: Request) -> bool:
    """Return whether the client prefers a table."""
    return "as=Table" in request.headers.get("accept", "")


def table(resource: Resource, items: list[Json], meta: Json, now: float | None = None) -> Json:
    """Return the objects as rows; ages count up to ``now`` (seconds since the epoch)."""
    moment = time.time() if now is None else now
    columns, cells = _COLUMNS.get(resource.plural, (("Name", "Age"), _plain))
    rows = [{"cells": cells(item, moment), "object": _partial(item)} for item in items]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": meta,
        "columnDefinitions": [_column(name) for name in columns],
        "rows": rows,
    }


def _column(name: str) -> Json:
    wide = name in ("IP", "Node")
    kind = "integer" if name == "Restarts" else "string"
    form = "name" if name == "Name" else ""
    return {
        "name": name,
        "type": kind,
        "format": form,
        "description": "",
        "priority": 1 if wide else 0,
    }


def _partial(item: Json) -> Json:
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": item["metadata"],
    }


def _age(item: Json, now: float) -> str:
    return age(now - _timeline.seconds(item["metadata"]["creationTimestamp"]))


def age(seconds: float) -> str:
    """Return an age as kubectl writes it: ``42s``, ``3m7s``, ``5h``."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60}s" if whole % 60 else f"{whole // 60}m"
    if whole < 3 * 3600:
        return f"{whole // 60}m"
    if whole < 48 * 3600:
        return f"{whole // 3600}h"
    return f"{whole // 86400}d"


def _plain(item: Json, now: float) -> list[Any]:
    return [item["metadata"]["name"], _age(item, now)]


def _pod(item: Json, now: float) -> list[Any]:
    statuses = item["status"].get("containerStatuses", [])
    ready = f"{sum(entry['ready'] for entry in statuses)}/{len(item['spec']['containers'])}"
    where = [item["status"].get("podIP", "<none>"), item["spec"].get("nodeName", "<none>")]
    return [item["metadata"]["name"], ready, _pod_word(item), 0, _age(item, now), *where]


def _pod_word(item: Json) -> str:
    """Return the STATUS of ``kubectl get pods``."""
    if _facts.deleting(item) and not _facts.ended(item):
        return "Terminating"
    if item["status"].get("reason"):
        return str(item["status"]["reason"])
    for entry in item["status"].get("containerStatuses", []):
        for state in ("waiting", "terminated"):
            if state in entry["state"]:
                return str(entry["state"][state]["reason"])
    return _facts.phase(item)


def _job(item: Json, now: float) -> list[Any]:
    status = item["status"]
    word = "Running"
    for kind in ("Suspended", "FailureTarget", "SuccessCriteriaMet", "Failed", "Complete"):
        if _status.true_condition(status, kind):
            word = kind
    if "deletionTimestamp" in item["metadata"]:
        word = "Terminating"
    done = f"{status.get('succeeded', 0)}/{item['spec'].get('completions', 1)}"
    lasted = ""
    if "startTime" in status:
        end = _timeline.seconds(status["completionTime"]) if "completionTime" in status else now
        lasted = age(end - _timeline.seconds(status["startTime"]))
    return [item["metadata"]["name"], word, done, lasted, _age(item, now)]


def _event(item: Json, now: float) -> list[Any]:
    about = item["involvedObject"]
    seen = age(now - _timeline.seconds(item["lastTimestamp"]))
    return [
        seen,
        item["type"],
        item["reason"],
        f"{about['kind'].lower()}/{about['name']}",
        item["message"],
    ]


_COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[Json, float], list[Any]]]] = {
    "pods": (("Name", "Ready", "Status", "Restarts", "Age", "IP", "Node"), _pod),
    "jobs": (("Name", "Status", "Completions", "Duration", "Age"), _job),
    "events": (("Last Seen", "Type", "Reason", "Object", "Message"), _event),
}
