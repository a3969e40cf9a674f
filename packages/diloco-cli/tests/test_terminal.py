"""The console script on a terminal: colours, 40 columns, questions."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from cli_lab import PATIENCE, wait_until

pytestmark = pytest.mark.processes


# As a program, because a process with threads, such as one that runs tests, must not fork.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def on_terminal(laptop, words, columns=80, typed=None, **variables):
    """What a command prints on a terminal of its own, and its exit code.

    Of ``typed``, the second text is typed when the first is there. It is typed again if nothing
    happens: Python does not notice a Ctrl-C that comes just before it begins to read.
    """
    environment = {**os.environ, "TERM": "xterm-256color", **variables}
    environment.pop("COLUMNS", None)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        if name not in variables:
            environment.pop(name, None)
    terminal, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *words],
        stdin=other,
        stdout=other,
        stderr=other,
        cwd=laptop.folder,
        env=environment,
        start_new_session=True,
    )
    os.close(other)
    printed, lines, deadline = b"", -1, time.monotonic() + PATIENCE
    while True:
        assert time.monotonic() < deadline, f"it hangs, and has printed {printed}"
        begun = typed is not None and typed[0].encode() in printed
        if begun and lines == -1:
            os.write(terminal, typed[1].encode())
            lines = printed.count(b"\n")
        if not select.select([terminal], [], [], 3.0)[0]:
            # Ctrl-C itself is shown, in the same line.
            lines = -1 if lines == printed.count(b"\n") else lines
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end is closed, on Linux
            piece = b""
        if not piece:
            break
        printed += piece
    os.close(terminal)
    return printed.decode().replace("\r\n", "\n"), process.wait(PATIENCE)


def test_colours_and_40_columns(laptop):
    laptop.launch("steps", {"count": 1, "fails": 1}, "colours", n=2, wait=True)
    words = laptop.words("status", "colours")
    coloured, code = on_terminal(laptop, words, 40)
    assert code == 1
    assert "\x1b[31mfailed" in coloured
    plain, code = on_terminal(laptop, words, 40, NO_COLOR="1", FORCE_COLOR="1")
    assert code == 1
    assert "\x1b" not in plain
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain
    _, head, *rows, last = plain.splitlines()
    assert head.split() == ["RANK", "STATE", "REASON", "EXIT"], "what does not fit is left out"
    assert max(map(len, [head, *rows])) <= 40
    assert last == "rank 1: ValueError: no data"
    wide, _ = on_terminal(laptop, words, 120, TERM="dumb")
    assert wide.splitlines()[1].split()[-2:] == ["STARTED", "TOOK"]
    assert "\x1b" not in wide


def test_prefixes_of_ranks_are_coloured(laptop):
    laptop.launch("steps", {"count": 1}, "ranks", n=2, wait=True)
    printed, code = on_terminal(laptop, laptop.words("logs", "ranks"))
    assert code == 0
    assert printed.splitlines() == [
        "\x1b[36m0 | \x1b[0mstep 0 of rank 0",
        "\x1b[35m1 | \x1b[0mstep 0 of rank 1",
    ]


def test_it_asks_on_a_terminal(laptop):
    handles = laptop.launch("waits", {"folder": str(laptop.folder)}, "asked")
    words = laptop.words("cancel", "asked")
    question = "cancel asked? [y/N]: "
    declined, code = on_terminal(laptop, words, 200, (question, "n\n"))
    assert code == 2
    assert declined.startswith("this ends 1 replica of run asked, on local_process (")
    assert declined.endswith("nothing was done\n")
    interrupted, code = on_terminal(laptop, words, 200, (question, "\x03"))
    assert code == 130
    assert interrupted.endswith("interrupted\n")
    assert laptop.executor.poll(handles[0]) == "running"
    _, code = on_terminal(laptop, words, 200, (question, "y\n"))
    assert code == 0
    wait_until(lambda: laptop.executor.poll(handles[0]) == "cancelled", "the end")


def test_ctrl_c_on_a_terminal(laptop):
    laptop.launch("waits", {"folder": str(laptop.folder)}, "looked-at")
    printed, code = on_terminal(
        laptop, laptop.words("logs", "looked-at", "-f"), 200, ("waiting", "\x03")
    )
    assert code == 130
    assert printed.endswith(
        "run looked-at is left as it is. Come back with:\n"
        "  diloco logs looked-at -f --since 1m --backend local_process\n"
    )
