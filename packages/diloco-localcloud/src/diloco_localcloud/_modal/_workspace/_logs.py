"""The output of containers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ._call import Call

#: The numbers of FileDescriptor in Modal's protocol.
SOURCES = {"stdout": 1, "stderr": 2, "system": 3}


_LINES = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class Entry:
    """A line, with its line feed if it has one.

    Attributes:
        number: its place in the log of the workspace, from 1.
        time: when it was written, in seconds since the epoch.
        data: the text.
        source: one of the numbers of ``SOURCES``.
    """

    number: int
    time: float
    data: str
    source: int
    app_id: str
    function_id: str
    function_call_id: str
    input_id: str
    task_id: str


class Logs:
    """The logs of a workspace; its owner calls it under a lock."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def write(self, now: float, call: Call, task_id: str, text: str, source: str) -> None:
        """Add the lines of a text."""
        function = call.function
        for line in _LINES.findall(text):
            self._entries.append(
                Entry(
                    len(self._entries) + 1,
                    now,
                    line,
                    SOURCES[source],
                    function.app.app_id,
                    (function.base or function).function_id,
                    call.call_id,
                    call.input_id,
                    task_id,
                )
            )

    def read(
        self,
        conditions: Mapping[str, object],
        search: str = "",
        since: float = 0.0,
        until: float = float("inf"),
    ) -> list[Entry]:
        """Return the entries of a span of time, both ends included.

        Args:
            conditions: values that their fields must have; an empty one or 0 is no condition.
            search: a part of their text.
            since: in seconds since the epoch.
            until: in seconds since the epoch.
        """
        wanted = [(name, value) for name, value in conditions.items() if value]
        return [
            entry
            for entry in self._entries
            if since <= entry.time <= until
            and search in entry.data
            and all(getattr(entry, name) == value for name, value in wanted)
        ]
