"""Samples of the sizes of logs, which tell when each byte was written without touching the data."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ._own import open_own_stream
from ._rundir import AttemptDir
from ._verdict import LATEST

#: Seconds between two samples of the sizes of a growing log: the resolution of ``since`` and
#: ``until``.
SAMPLE_SECONDS = 0.5


class Sampler:
    """A sampler that appends ``[unix seconds, bytes of stdout, bytes of stderr]`` to a file.

    It does so whenever one of the logs has grown.
    """

    def __init__(self) -> None:
        self._last: tuple[object, int, int] | None = None

    def sample(self, attempt: AttemptDir) -> None:
        """Look at the logs of ``attempt`` once."""
        sizes = [size_of(attempt.log(stream)) for stream in ("stdout", "stderr")]
        current = (attempt.path, sizes[0], sizes[1])
        if current == self._last or not any(sizes):
            return
        with open_own_stream(attempt.times, "ab") as stream:
            stream.write(json.dumps([time.time(), *sizes]).encode() + b"\n")
        self._last = current


def size_of(path: Path) -> int:
    """Return the number of bytes in a file; 0 if there is none that can be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_sample(text: str) -> tuple[float, int, int] | None:
    """Return the sample in a line that `Sampler` wrote; None if it is something else.

    No log is withheld because of that.
    """
    try:
        moment, out, err = json.loads(text)
        moment, out, err = float(moment), int(out), int(err)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    in_range = 0 <= moment <= LATEST and 0 <= out < 1 << 63 and 0 <= err < 1 << 63
    return (moment, out, err) if in_range else None
