"""RPCs about logs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from modal_proto import api_pb2

from .._workspace._logs import Entry
from ._context import Context, Rpcs

_CONDITIONS = ("app_id", "function_id", "function_call_id", "task_id", "source")


class LogReader(Rpcs):
    """Operations on the logs of a workspace."""

    def _serve_app_fetch_logs(self, request: Any, _: Context) -> Any:
        entries = self._read(request)
        if request.limit:
            entries = entries[-request.limit :]
        return api_pb2.AppFetchLogsResponse(batches=_batches(entries))

    def _serve_app_count_logs(self, request: Any, _: Context) -> Any:
        """Count the entries in each piece of a span of time, including the empty pieces.

        The client cuts the span at the pieces.
        """
        width = request.bucket_secs or 1
        first = request.since.seconds // width
        answer = api_pb2.AppCountLogsResponse(app_id=request.app_id)
        for number in range(first, request.until.seconds // width + 1):
            answer.buckets.add().bucket_start_at.seconds = number * width
        for entry in self._read(request):
            bucket = answer.buckets[int(entry.time // width) - first]
            if entry.source == api_pb2.FILE_DESCRIPTOR_STDOUT:
                bucket.stdout_logs += 1
            elif entry.source == api_pb2.FILE_DESCRIPTOR_STDERR:
                bucket.stderr_logs += 1
            else:
                bucket.system_logs += 1
        return answer

    def _read(self, request: Any) -> list[Entry]:
        since = request.since.seconds + request.since.nanos / 1e9
        until = request.until.seconds + request.until.nanos / 1e9 or float("inf")
        conditions = {name: getattr(request, name) for name in _CONDITIONS}
        return self._workspace.logs.read(conditions, request.search_text, since, until)


def _batches(entries: Iterable[Entry]) -> list[Any]:
    """Return one batch for each run of entries of the same container."""

    def place(entry: Entry) -> tuple[str, str, str]:
        return entry.task_id, entry.function_id, entry.input_id

    made = []
    for (task_id, function_id, input_id), group in itertools.groupby(entries, place):
        batch = api_pb2.TaskLogsBatch(task_id=task_id, function_id=function_id, input_id=input_id)
        for entry in group:
            batch.items.add(
                data=entry.data,
                timestamp=entry.time,
                timestamp_ns=int(entry.time * 1e9),
                file_descriptor=entry.source,
                function_call_id=entry.function_call_id,
                input_id=entry.input_id,
            )
            batch.entry_id = str(entry.number)
        made.append(batch)
    return made
