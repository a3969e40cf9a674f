"""A replica that does what a test says, through files in a folder that both can see.

It is one file, and needs the standard library only. Its folder goes onto the replica's import path
(or the file into its image), and the entrypoint is ``puppet:perform``.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def perform(puppets: str, **kwargs: Any) -> Any:
    """Report what the replica was told, then obey.

    Args:
        puppets: The folder, as :class:`diloco_conformance.Puppets` knows it.
        **kwargs: Anything; it is reported as it is.

    Returns:
        The value that it is made to return.
    """
    folder, attempt = Path(puppets), os.environ["DILOCO_ATTEMPT"]
    replica = f"{os.environ['DILOCO_RUN_ID']}-{os.environ['REPLICA_RANK']}"
    # Runs of the same name follow one another, and each has a first attempt.
    before = len(list(folder.glob(f"{replica}-1.*.told"))) - (attempt != "1")
    name = f"{replica}-{attempt}.{max(0, before)}"
    told = {
        "kwargs": {"puppets": puppets, **kwargs},
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }
    _write(folder / f"{name}.told", told)
    number = idle = 0
    while True:
        try:
            order = json.loads((folder / f"{name}.order-{number}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            idle += 1
            if idle % 200 == 0 and _is_over(folder):
                sys.exit(f"the test that owns {folder} is over")
            time.sleep(0.005 if idle < 100 else 0.02)
            continue
        if "print" in order:
            data = "".join(f"{line}\n" for line in order["print"]).encode()
            _say(data, "stdout", folder / f"{name}.done-{number}")
            number += 1
        elif "write" in order:
            data = base64.b64decode(order["write"]["data"])
            _say(data, order["write"]["stream"], folder / f"{name}.done-{number}")
            number += 1
        elif "kill" in order:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.Signals[order["kill"]])
            signal.pause()
        elif "fail" in order:
            sys.exit(order["fail"])
        else:
            return order["succeed"]


def _is_over(folder: Path) -> bool:
    """Say whether the test is over: its folder is gone, or the process that locked it has ended."""
    if not folder.exists():
        return True
    try:
        lock = os.open(folder / "alive", os.O_RDONLY)
    except OSError:
        return False  # a folder that the test does not share
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def _say(data: bytes, stream: str, done: Path) -> None:
    output = getattr(sys, stream).buffer
    output.write(data)
    output.flush()
    _write(done, {})


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.rename(path)
