"""The output of programs, line by line."""

from __future__ import annotations

import codecs
import os
import selectors
from collections.abc import Callable, Sequence


def read_lines(
    pipes: Sequence[int],
    write: Callable[[int, bytes], None],
    *,
    idle_seconds: float | None = None,
    most: int = 1 << 60,
) -> None:
    """Pass on all output from pipes until all their writers are gone; then close them.

    Args:
        pipes: their reading ends.
        write: gets the number of the pipe, and one or more whole lines; only the last one may lack
            its newline.
        idle_seconds: after so long without new text, an unfinished line is passed on, too; None for
            never.
        most: a longer line is passed on in pieces of so many bytes.
    """
    tails = dict.fromkeys(pipes, b"")
    fresh = False
    try:
        with selectors.DefaultSelector() as ready:
            for pipe in pipes:
                ready.register(pipe, selectors.EVENT_READ)
            while ready.get_map():
                events = ready.select(idle_seconds if fresh else None)
                fresh = bool(events)
                for pipe in pipes if not events else ():
                    # A partial character waits for its end.
                    used = codecs.utf_8_decode(tails[pipe], "replace", False)[1]
                    if used:
                        write(pipes.index(pipe), tails[pipe][:used])
                    tails[pipe] = tails[pipe][used:]
                for key, _ in events:
                    pipe = key.fd
                    data = os.read(pipe, 65536)
                    whole, feed, rest = (tails[pipe] + data).rpartition(b"\n")
                    end = max(0, len(rest) - 1) // most * most if data else len(rest)
                    text, tails[pipe] = whole + feed + rest[:end], rest[end:]
                    if text:
                        write(pipes.index(pipe), text)
                    if not data:
                        ready.unregister(pipe)
    finally:
        for pipe in pipes:
            os.close(pipe)
