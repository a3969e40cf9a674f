"""The output of programs, line by line."""

from __future__ import annotations

import codecs
import os
import selectors
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def read_lines(
    pipes: Sequence[int], write: Callable[[int, str], None], idle_seconds: float | None = None
) -> None:
    """Pass on all text from pipes until all their writers are gone; then close them.

    Args:
        pipes: their reading ends.
        write: gets the number of the pipe, and one or more whole lines; only the last one may lack
            its newline. Bytes that are not text are replaced.
        idle_seconds: after so long without new text, an unfinished line is passed on, too; None for
            never.
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
                    begun, used = codecs.utf_8_decode(tails[pipe], "replace", False)
                    tails[pipe] = tails[pipe][used:]  # a partial character waits for its end
                    if begun:
                        write(pipes.index(pipe), begun)
                for key, _ in events:
                    pipe = key.fd
                    data = os.read(pipe, 65536)
                    whole, feed, rest = (tails[pipe] + data).rpartition(b"\n")
                    tails[pipe] = rest if data else b""
                    text = whole + feed + (b"" if data else rest)
                    if text:
                        write(pipes.index(pipe), text.decode(errors="replace"))
                    if not data:
                        ready.unregister(pipe)
    finally:
        for pipe in pipes:
            os.close(pipe)
