"""A PID namespace for a container, if this machine allows it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from ..._server._errors import StandInError

_OWN = ("--pid", "--fork", "--mount-proc", "--kill-child")


@functools.cache
def wrapper() -> tuple[str, ...]:
    """Return the command that makes another one PID 1 of a namespace with a /proc of its own.

    Raises:
        StandInError: this machine has or allows no PID namespaces.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        raise StandInError(
            "PID namespaces need the command unshare of util-linux, on Linux; leave pid_namespaces "
            "out"
        )
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    words = (unshare, *user, *_OWN)
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise StandInError(
            f"this machine allows no PID namespaces ({tried.stderr.strip()}); leave pid_namespaces "
            "out"
        )
    return words
