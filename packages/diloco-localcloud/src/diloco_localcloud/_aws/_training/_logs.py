"""The output of jobs, as CloudWatch Logs keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The log group of all training jobs.
GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass
class Stream:
    """One log stream.

    Attributes:
        created: when it was created, in milliseconds since the epoch.
        events: (moment in milliseconds, message), oldest first.
    """

    created: int
    events: list[tuple[int, str]] = field(default_factory=list)


class Logs:
    """The streams of the group by name; guarded by the region's lock."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.group_exists = False

    def write(self, name: str, now: float, text: str) -> None:
        """Add the lines of a text to a stream, which is made if need be: one event per line."""
        self.group_exists = True
        moment = int(now * 1000)
        stream = self.streams.setdefault(name, Stream(moment))
        stream.events += [(moment, line) for line in text.removesuffix("\n").split("\n")]
