"""Functions that tests deploy, and that containers import by the name of this module."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import modal

SLEEP = "import time; time.sleep(600)"


def answer(*args, **kwargs):
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")
    return args, kwargs, modal.current_function_call_id(), os.environ.get("KEY")


def fail(kind):
    if kind == "exception":
        raise ValueError("no more data")
    if kind == "timeout":
        raise TimeoutError("barrier")
    if kind == "exit":
        sys.exit(3)
    os._exit(5)


def claim(rank):
    held = modal.Dict.from_name("run")
    return held.put(f"call-{rank}", modal.current_function_call_id(), skip_if_exists=True)


def wait(first="", last=""):
    """Start a process that leaves the group, say so, and wait until told to end.

    Args:
        first: a file that is written once the process is there.
        last: a file without which an interruption is not over.
    """
    child = None
    try:  # around all of it: an interruption may come as soon as the line is out
        child = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
        if first:
            Path(first).write_text(str(child.pid))
        sys.stdout.write(f"child {child.pid}\n")
        time.sleep(600)
    except BaseException as told:
        sys.stdout.write(f"told {type(told).__name__}\n")
        while last and not Path(last).exists():
            time.sleep(0.01)
        raise
    finally:
        if child is not None:
            child.kill()
            child.wait()


def ignore():
    while True:
        with contextlib.suppress(BaseException):
            sys.stdout.write("ready\n")
            time.sleep(600)


def eat(mebibytes):
    held = bytearray(mebibytes << 20)
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(600)
