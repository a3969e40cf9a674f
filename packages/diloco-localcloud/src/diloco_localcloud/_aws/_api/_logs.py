"""The operations of CloudWatch Logs with which logs of training jobs are read."""

from __future__ import annotations

from typing import Any

from .._model._refused import RefusedError, wrong_parameter
from .._training._region import GROUP, Region, Stream
from ._paging import page

Json = dict[str, Any]


class CloudWatchLogs:
    """Answers requests that keep to the service model; called under the region's lock."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def _serve_describe_log_streams(self, request: Json) -> Json:
        streams = self._group(request)
        if request.get("orderBy") == "LastEventTime" or request.get("descending"):
            raise wrong_parameter("the stand-in orders streams by their names, ascending")
        prefix = request.get("logStreamNamePrefix", "")
        names = sorted(name for name in streams if name.startswith(prefix))
        limit, token = request.get("limit", 50), request.get("nextToken")
        part, token = page(names, limit, token, wrong_parameter)
        descriptions = [self._told(name, streams[name]) for name in part]
        return {"logStreams": descriptions} | ({} if token is None else {"nextToken": token})

    def _serve_get_log_events(self, request: Json) -> Json:
        stream = self._stream(request)
        events = [event for event in stream.events if _in_time(event[0], request)]
        size, token = request.get("limit", 10000), request.get("nextToken")
        if token is None:
            forward = bool(request.get("startFromHead"))
            begin = end = 0 if forward else len(events)
        else:
            forward, begin = _read(token)
            end = begin
        if forward:
            end = begin + len(events[begin : begin + size])
        else:
            begin = max(0, end - size)
        items = [
            {"timestamp": at, "message": line, "ingestionTime": at}
            for at, line in events[begin:end]
        ]
        return {
            "events": items,
            "nextForwardToken": f"f/{end}",
            "nextBackwardToken": f"b/{begin}",
        }

    def _serve_delete_log_stream(self, request: Json) -> Json:
        self._stream(request)
        del self._region.logs.streams[request["logStreamName"]]
        return {}

    def _group(self, request: Json) -> dict[str, Stream]:
        if request["logGroupName"] != GROUP or not self._region.logs.group_exists:
            raise _not_found("group")
        return self._region.logs.streams

    def _stream(self, request: Json) -> Stream:
        stream = self._group(request).get(request["logStreamName"])
        if stream is None:
            raise _not_found("stream")
        return stream

    def _told(self, name: str, stream: Stream) -> Json:
        region = self._region
        return {
            "logStreamName": name,
            "creationTime": stream.created,
            "firstEventTimestamp": stream.events[0][0],
            "lastEventTimestamp": stream.events[-1][0],
            "arn": f"arn:aws:logs:{region.name}:{region.account}"
            f":log-group:{GROUP}:log-stream:{name}",
        }


def _not_found(what: str) -> RefusedError:
    words = f"The specified log {what} does not exist."
    return RefusedError("ResourceNotFoundException", words)


def _in_time(moment: int, request: Json) -> bool:
    since, until = request.get("startTime"), request.get("endTime")
    return (since is None or moment >= since) and (until is None or moment < until)


def _read(token: str) -> tuple[bool, int]:
    """Return the direction (True: forward) and the place."""
    way, _, place = token.partition("/")
    if way not in {"f", "b"} or not (place.isascii() and place.isdecimal() and len(place) < 16):
        raise wrong_parameter("The specified nextToken is invalid.")
    return way == "f", int(place)
