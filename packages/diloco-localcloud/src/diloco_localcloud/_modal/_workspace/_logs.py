"""The output of containers."""

from __future__ import annotations

import re
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
    call_id: str
    input_id: str
    task_id: str


@dataclass(frozen=True)
class Filter:
    """The conditions that wanted entries meet; an empty field is no condition."""

    app_id: str = ""
    function_id: str = ""
    call_id: str = ""
    task_id: str = ""
    source: int = 0
    search: str = ""

    def takes(self, entry: Entry) -> bool:
        """Return whether an entry meets the conditions."""
        pairs = (
            (self.app_id, entry.app_id),
            (self.function_id, entry.function_id),
            (self.call_id, entry.call_id),
            (self.task_id, entry.task_id),
        )
        return (
            all(not condition or condition == value for condition, value in pairs)
            and self.source in (0, entry.source)
            and self.search in entry.data
        )


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
        self, conditions: Filter, since: float = 0.0, until: float = float("inf")
    ) -> list[Entry]:
        """Return the entries of a span of time, both ends included."""
        return [
            entry
            for entry in self._entries
            if since <= entry.time <= until and conditions.takes(entry)
        ]
