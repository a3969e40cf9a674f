"""Events: the messages of the cluster about its objects."""

from __future__ import annotations

from typing import Any

from ..._server._timeline import Timeline
from .._objects import _resources
from .._objects._store import Store

Json = dict[str, Any]


class Recorder:
    """Writes events; an event that repeats is counted up."""

    def __init__(self, store: Store, timeline: Timeline) -> None:
        self._store = store
        self._timeline = timeline
        self._known: dict[tuple[str, str, str], str] = {}

    def say(
        self,
        about: Json,
        reason: str,
        message: str,
        *,
        source: str = "kubelet",
        warning: bool = False,
    ) -> None:
        """Write one event about an object, which must carry its kind and apiVersion."""
        meta, now = about["metadata"], self._timeline.stamp()
        namespace = meta.get("namespace") or "default"
        key = (meta["uid"], reason, message)
        old = self._store.find(_resources.EVENTS, namespace, self._known.get(key, ""))
        if old is not None:
            more = {"count": old["count"] + 1, "lastTimestamp": now}
            self._store.replace(_resources.EVENTS, {**old, **more})
            return
        name = f"{meta['name']}.{self._store.uid().replace('-', '')[:16]}"
        self._known[key] = name
        parts = ("namespace", "name", "uid", "resourceVersion")
        involved = {part: meta.get(part, "") for part in parts}
        involved |= {part: about[part] for part in ("kind", "apiVersion")}
        event = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "source": {"component": source},
            **dict.fromkeys(("firstTimestamp", "lastTimestamp"), now),
            "count": 1,
            "type": "Warning" if warning else "Normal",
            "eventTime": None,
            "reportingComponent": source,
            "reportingInstance": "",
        }
        self._store.add(_resources.EVENTS, self._store.prepare(_resources.EVENTS, event))
