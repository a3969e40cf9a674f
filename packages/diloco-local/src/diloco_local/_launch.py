"""Start a supervisor, and report how that went."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import diloco_protocol

from ._files import open_own_stream, read_tail
from ._orders import Order
from ._rundir import RunDir

# The supervisor is kept apart from the user's modules. It finds its own two packages by the
# launcher's folders: after the standard library, since such a folder may hold anything, and before
# what is installed, which may be another version.
_PROGRAM = (
    "import sys; sys.path += {folders!r}; import site; site.main(); "
    "from diloco_local._supervisor import main; main({lock}, {ready})"
)


class SupervisorError(Exception):
    """The error of a supervisor that could not start the replicas; says why."""


def start_supervisor(
    run: RunDir,
    lock: int,
    orders: Sequence[Order],
    *,
    recover: bool = False,
    patience: float = 60.0,
) -> None:
    """Start the supervisor of ``run`` in its own session, and wait until all replicas are started.

    Args:
        run: The published run.
        lock: Descriptor of the run's lock; held by the caller, unless ``recover``. The caller
            closes its own.
        orders: The replicas to start; empty for a recovery.
        recover: Whether it only finishes what an earlier supervisor of this run left behind.
        patience: Seconds to wait.

    Raises:
        SupervisorError: It could not start them; no replica of it is left running, unless the
            supervisor itself was killed.
    """
    reader, writer = os.pipe()
    try:
        try:
            _spawn(run, lock, writer, orders, recover=recover)
        finally:
            os.close(writer)
        answer = _read_line(reader, patience)
    finally:
        os.close(reader)
    if not answer:
        raise SupervisorError(
            f"the supervisor ended before it could answer. Its log: {read_tail(run.log) or 'empty'}"
        )
    error = json.loads(answer)["error"]
    if error is not None:
        raise SupervisorError(str(error))


def _spawn(run: RunDir, lock: int, writer: int, orders: Sequence[Order], *, recover: bool) -> None:
    folders = list(
        dict.fromkeys(str(Path(file).parents[1]) for file in (__file__, diloco_protocol.__file__))
    )
    job = {
        "run": str(run.path),
        "uid": run.uid,
        "recover": recover,
        "orders": [order.to_dict() for order in orders],
    }
    with contextlib.ExitStack() as opened:
        log = opened.enter_context(open_own_stream(run.log, "ab"))
        kept = []
        for descriptor in (lock, writer):
            # 0 to 2 are the supervisor's own streams; a launcher that has closed its own may have
            # other files there.
            kept.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
            opened.callback(os.close, kept[-1])
        program = _PROGRAM.format(folders=folders, lock=kept[0], ready=kept[1])
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=kept,
            cwd="/",
            start_new_session=True,
        )
        # The process ends at once: it reads its orders and forks, so that the launcher never has a
        # child to wait for.
        process.communicate(json.dumps(job).encode())


def _read_line(descriptor: int, patience: float) -> bytes:
    # select takes no descriptor above 1023, and a launcher may have more files open.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(patience * 1000):
        raise SupervisorError(f"the supervisor did not answer within {patience:g} s")
    with os.fdopen(descriptor, "rb", closefd=False) as stream:
        line = stream.readline()
    return line if line.endswith(b"\n") else b""
