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
    columns, cells = _COLUMNS.get(resource.plural, ("Name Age", _plain))
    kind, version = "PartialObjectMetadata", "meta.k8s.io/v1"
    rows = [
        {
            "cells": cells(item, moment),
            "object": {"kind": kind, "apiVersion": version, "metadata": item["metadata"]},
        }
        for item in items
    ]
    definitions = [_column(name.replace("_", " ")) for name in columns.split()]
    table = {"kind": "Table", "apiVersion": version, "metadata": meta}
    return {**table, "columnDefinitions": definitions, "rows": rows}


def _column(name: str) -> Json:
    return {
        "name": name,
        "type": "integer" if name == "Restarts" else "string",
        "format": "name" if name == "Name" else "",
        "description": "",
        "priority": int(name in ("IP", "Node")),  # 1 for those of the wide table alone
    }


def _age(item: Json, now: float) -> str:
    return age(now - _timeline.seconds(item["metadata"]["creationTimestamp"]))


def age(seconds: float) -> str:
    """Return an age in the largest unit of which there are two: ``42s``, ``3m``, ``5h``."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


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
    about = f"{item['involvedObject']['kind'].lower()}/{item['involvedObject']['name']}"
    seen = age(now - _timeline.seconds(item["lastTimestamp"]))
    return [seen, item["type"], item["reason"], about, item["message"]]


_COLUMNS: dict[str, tuple[str, Callable[[Json, float], list[Any]]]] = {
    "pods": ("Name Ready Status Restarts Age IP Node", _pod),
    "jobs": ("Name Status Completions Duration Age", _job),
    "events": ("Last_Seen Type Reason Object Message", _event),
}
