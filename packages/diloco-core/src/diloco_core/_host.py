"""The machine that a process runs on, and whether another process of this machine is gone."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import sys
import uuid
from pathlib import Path


@functools.cache
def host_id() -> str:
    """Identify the place in which a process id means the same process.

    It is the machine since it was booted, and the container. The name of the host is not enough:
    containers may share it, and have process ids of their own.
    """
    parts = [socket.gethostname()]
    if sys.platform == "linux":
        try:
            boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
            parts += [boot.read_text(), str(namespace.readlink())]
        except OSError:
            parts.append(secrets.token_hex(8))  # an id that no other process has
    else:
        parts.append(f"{uuid.getnode():x}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def host_name() -> str:
    """The name of the machine, with its id: what a process writes down about where it runs."""
    return f"{socket.gethostname()} ({host_id()})"


def is_gone(pid: int, host: str) -> bool:
    """Say whether a process on a host with this :func:`host_name` is certainly gone."""
    if host != host_name() or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # it is another user's, and exists
        return False
    return False
