"""Ask a fresh interpreter whether the entrypoint can be imported, before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from diloco_protocol import InvalidRequestError, Reason, environment
from diloco_protocol.backend import is_shortage

from ._files import read_tail, write_text
from ._orders import Order
from ._processes import MARKER, ProcessEntry, members, process_table
from ._record import outcome_of
from ._rundir import AttemptDir

_PATIENCE = 5.0  # seconds; some processes do not die at once
_START = 0.5  # seconds from a fork to an interpreter with an environment of its own


def check_entrypoint(order: Order, *, timeout: float = 300.0) -> None:
    """Have the runner of a replica import its entrypoint and check its arguments, and no more.

    Args:
        order: The order for the replica.
        timeout: Seconds after which an import is given up.

    Raises:
        InvalidRequestError: It cannot be imported; says which module or attribute, and how the
            import failed. Or it does not take these arguments.
    """
    entrypoint, python, process = order.spec.entrypoint, order.argv[0], None
    marker = f"check/{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="diloco-check-") as folder:
        files = AttemptDir(Path(folder))
        try:
            write_text(files.spec, order.spec.to_json())
            # Files instead of pipes: a module may print without end, or leave a process behind
            # that keeps a pipe open.
            with files.log("stderr").open("wb") as errors:
                process = subprocess.Popen(
                    [*order.argv, "--spec", files.spec, "--check", files.outcome],
                    env={**order.env, **environment(order.spec), MARKER: marker},
                    cwd=order.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            code = process.wait(timeout)
        except OSError as error:
            raise InvalidRequestError(
                f"the interpreter {python!r} cannot be started in {order.cwd!r}: {error}",
                retryable=is_shortage(error),
            ) from error
        except subprocess.TimeoutExpired as error:
            raise InvalidRequestError(
                f"importing the entrypoint {entrypoint!r} took more than {timeout:g} s"
            ) from error
        finally:
            _end(marker, process)
        outcome, problem = outcome_of(files)
        if outcome is None:
            last_words = problem or read_tail(files.log("stderr"))
            raise InvalidRequestError(
                f"importing the entrypoint {entrypoint!r} ended the interpreter with code {code}: "
                f"{last_words or f'it printed nothing (is there room in {folder}?)'}"
            )
    if outcome.reason is Reason.START_FAILED:
        raise InvalidRequestError(
            f"the entrypoint {entrypoint!r} cannot be used (interpreter {python}, working "
            f"directory {order.cwd}): {outcome.error}. Put the folder of its module into "
            f"pythonpath=[...] or cwd=, or install it.\n{outcome.traceback}"
        )
    if outcome.exit_code:
        raise InvalidRequestError(
            f"the check of entrypoint {entrypoint!r} with its arguments failed: {outcome.error}"
        )


def _end(marker: str, process: subprocess.Popen[bytes] | None) -> None:
    """End what the import has started, even if it was interrupted.

    A launch that is refused leaves nothing. A process that has cleared its environment is found by
    its session.
    """
    if process is None:
        # It may exist, and its number was never returned. It can be found once it is an
        # interpreter.
        time.sleep(_START)
    session = -1 if process is None else process.pid
    deadline = time.monotonic() + _PATIENCE
    while (left := _left(marker, session)) and time.monotonic() < deadline:
        for entry in left.values():
            entry.identity.send(signal.SIGKILL)
        time.sleep(0.01)
    if process is not None:
        process.kill()
        process.wait()


def _left(marker: str, session: int) -> dict[int, ProcessEntry]:
    table = process_table()
    return members(marker, (), table) | {
        pid: entry for pid, entry in table.items() if _session(pid) == session
    }


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # gone, or it may not be asked
        return None
