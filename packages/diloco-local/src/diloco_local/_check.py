"""Ask a fresh interpreter whether the entrypoint can be imported, before anything is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import is_shortage

from ._environment import SAFE_PATH
from ._files import DamagedFileError, read_json, read_tail
from ._processes import MARKER, ProcessEntry, members, process_table

_PATIENCE = 5.0  # seconds; some processes do not die at once
_START = 0.5  # seconds from a fork to an interpreter with an environment of its own

# Writes to a file and not to stdout, which belongs to the modules it imports.
_PROGRAM = """
import functools, importlib, json, sys, traceback, types
module, name, kwargs, report = sys.argv[1:]
sys.argv[1:] = []
answer, step = {}, "module"
try:
    target = importlib.import_module(module)
    step = "attribute"
    try:
        target = functools.reduce(getattr, name.split("."), target)
    except AttributeError:
        inner = f"{module}.{name}"
        try:
            target = importlib.import_module(inner)
        except ModuleNotFoundError as error:
            if not f"{inner}.".startswith(f"{error.name}."):
                raise
            target = None
        if target is None:
            raise
    if isinstance(target, types.ModuleType):
        target = target.main
    if not callable(target):
        answer = {"step": "callable", "error": f"it is a {type(target).__name__}"}
    elif callable(check := getattr(target, "check_arguments", None)):
        with open(kwargs) as stream:
            kwargs = json.load(stream)
        try:
            check(**kwargs)
        except Exception as error:
            answer = {"step": "arguments", "error": f"{type(error).__name__}: {error}"}
except BaseException as error:
    answer = {
        "step": step if isinstance(error, AttributeError) else "module",
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exc(),
    }
with open(report, "w") as stream:
    json.dump(answer, stream)
"""


def check_entrypoint(
    entrypoint: str,
    kwargs: Mapping[str, Any],
    *,
    python: str,
    env: Mapping[str, str],
    cwd: str,
    timeout: float = 300.0,
) -> None:
    """Import ``"package.module:function"`` in a fresh interpreter, as a replica would.

    A replica imports it in ``diloco_protocol._child``. If the function has a ``check_arguments``,
    that is called with its arguments.

    Args:
        entrypoint: The entrypoint to import.
        kwargs: Its arguments.
        python: The replica's interpreter.
        env: The replica's environment.
        cwd: The replica's working directory.
        timeout: Seconds after which an import is given up.

    Raises:
        InvalidRequestError: It cannot be imported; says which module or attribute, and how the
            import failed. Or it does not take these arguments.
    """
    module, _, name = entrypoint.partition(":")
    marker = f"check/{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="diloco-check-") as folder:
        report, log = Path(folder, "report.json"), Path(folder, "stderr.log")
        arguments = Path(folder, "kwargs.json")
        try:
            arguments.write_text(json.dumps(kwargs))
            # A file instead of a pipe: a module may print without end, or leave a process behind
            # that keeps a pipe open.
            with log.open("wb") as errors:
                try:
                    process = subprocess.Popen(
                        [python, *SAFE_PATH, "-c", _PROGRAM, module, name, arguments, report],
                        env={**env, MARKER: marker},
                        cwd=cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        start_new_session=True,
                    )
                except KeyboardInterrupt:
                    # The process exists, but its number was never returned. It can be found once it
                    # is an interpreter.
                    time.sleep(_START)
                    _end(marker, -1)
                    raise
            try:
                code = process.wait(timeout)
            finally:
                _end(marker, process.pid)
                process.kill()
                process.wait()
        except OSError as error:
            raise InvalidRequestError(
                f"the interpreter {python!r} cannot be started in {cwd!r}: {error}",
                retryable=is_shortage(error),
            ) from error
        except subprocess.TimeoutExpired as error:
            raise InvalidRequestError(
                f"importing module {module!r} of entrypoint {entrypoint!r} took more than "
                f"{timeout:g} s"
            ) from error
        try:
            answer = read_json(report)
        except DamagedFileError:
            answer = None
        if answer is None:
            raise InvalidRequestError(
                f"importing module {module!r} of entrypoint {entrypoint!r} ended the interpreter "
                f"with code {code}: "
                f"{read_tail(log) or f'it printed nothing (is there room in {folder}?)'}"
            )
    if not answer:
        return
    if answer["step"] == "arguments":
        raise InvalidRequestError(
            f"the arguments of entrypoint {entrypoint!r} are refused: {answer['error']}"
        )
    where = f"(interpreter {python}, working directory {cwd})"
    if answer["step"] == "module":
        raise InvalidRequestError(
            f"module {module!r} of entrypoint {entrypoint!r} cannot be imported: {answer['error']} "
            f"{where}. Put its folder into pythonpath=[...] or cwd=, or install "
            f"it.\n{answer['traceback']}"
        )
    if answer["step"] == "attribute":
        raise InvalidRequestError(
            f"module {module!r} has no attribute {name!r} (entrypoint {entrypoint!r}): "
            f"{answer['error']} {where}"
        )
    raise InvalidRequestError(
        f"{name!r} of module {module!r} cannot be called: {answer['error']} {where}"
    )


def _end(marker: str, session: int) -> None:
    """End what the import has started, even if it was interrupted.

    A launch that is refused leaves nothing. A process that has cleared its environment is found by
    its session.
    """
    deadline = time.monotonic() + _PATIENCE
    while (left := _left(marker, session)) and time.monotonic() < deadline:
        for entry in left.values():
            entry.identity.send(signal.SIGKILL)
        time.sleep(0.01)


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
