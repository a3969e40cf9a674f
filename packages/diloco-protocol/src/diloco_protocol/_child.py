"""The process in which an entrypoint runs. The runner starts it.

Its command line is ``python -m diloco_protocol._child SPEC REPORT``. A runner that only checks an
entrypoint does this itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ._errors import DilocoError, InvalidRequestError
from ._outcome import FINAL_CODE, Outcome
from ._spec import ReplicaSpec
from ._types import Reason


def main() -> None:
    """Call the entrypoint, write the report, and exit with the replica's exit code."""
    spec = ReplicaSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(call(spec, Path(sys.argv[2])))


def call(spec: ReplicaSpec, report_path: Path, *, only_check: bool = False) -> int:
    """Call an entrypoint, or only check it; write the report and return the exit code.

    A check imports it, and calls its ``check_arguments``, if it has any.
    """
    sys.argv[1:] = []
    code, report = _call(spec, only_check=only_check)
    if report is not None:
        partial = report_path.with_suffix(".partial")
        partial.write_text(report, encoding="utf-8")
        partial.replace(report_path)
    return code


def _call(spec: ReplicaSpec, *, only_check: bool) -> tuple[int, str | None]:
    """Return the exit code and the report.

    The report is an outcome, or None if the entrypoint neither returned nor failed.
    """
    module, _, name = spec.entrypoint.partition(":")
    step = f"importing module {module!r}"
    try:
        imported = importlib.import_module(module)
        step = f"looking up {name!r} in module {module!r}"
        try:
            function: Any = functools.reduce(getattr, name.split("."), imported)
        except AttributeError:
            function = _submodule(module, name)
            if function is None:
                raise
        if isinstance(function, ModuleType):  # "package.module" was meant
            step = f"looking up 'main' in module {function.__name__!r}"
            function = function.main
        if only_check:
            if not callable(function):
                raise TypeError(f"it is a {type(function).__name__}, which cannot be called")
            function = getattr(function, "check_arguments", None) or dict
        step = ""
        try:
            result = function(**spec.kwargs)
        finally:
            _restore_limits()
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    except BaseException as error:  # noqa: BLE001 - every exception is reported
        begin = _users_part(sys.exc_info()[2])
        trace = "".join(traceback.format_exception(type(error), error, begin))
        _log(trace.removesuffix("\n"))
        text = f"{type(error).__name__}: {_text_of(error)}"
        code = FINAL_CODE if isinstance(error, DilocoError) and error.final else 1
        return code, Outcome(
            code,
            error=f"{step} failed: {text}" if step else text,
            error_type=type(error).__name__,
            traceback=trace,
            reason=Reason.START_FAILED if step else Reason.ERROR,
        ).to_json()
    try:
        return 0, Outcome(0, result=None if only_check else result).to_json()
    except InvalidRequestError as error:
        text = (
            f"the entrypoint {spec.entrypoint} returned something that cannot be reported: {error}"
        )
        _log(text)
        # It would return the same again, after all of its work.
        return FINAL_CODE, Outcome(FINAL_CODE, error=text, error_type="InvalidResult").to_json()


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of what only calls the user's code.

    These are that of this module, and those that set ``__tracebackhide__``, as pytest has it.
    """
    while trace and (rest := trace.tb_next):
        frame = trace.tb_frame
        if frame.f_code.co_filename != __file__ and "__tracebackhide__" not in frame.f_locals:
            break
        trace = rest
    return trace


def _submodule(module: str, name: str) -> ModuleType | None:
    """Return a module inside a package; None if there is none.

    A module that exists and cannot be imported is an error.
    """
    full_name = f"{module}.{name}"
    try:
        return importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{full_name}.".startswith(f"{error.name}."):
            return None
        raise


def _exit_code(request: SystemExit) -> tuple[int, str | None]:
    """Return the exit code that the interpreter itself would give to a SystemExit."""
    if request.code is None:
        return 0, None
    if isinstance(request.code, int):
        # The interpreter takes -1 for an integer that does not fit into a C long.
        code = request.code & 0xFF if -(2**63) <= request.code < 2**63 else 0xFF
        words = f" with code {code}"
    else:
        text = _text_of(request.code)
        _log(text)
        code, words = 1, f": {text}"
    if code == 0:  # exit(256) is a success for the operating system, so it is one here too
        return 0, None
    error = f"the entrypoint exited{words}"
    return code, Outcome(code, error=error, error_type="SystemExit").to_json()


def _log(text: str) -> None:
    """Write into the replica's log; do nothing if the entrypoint has closed it."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the replica's log


def _text_of(value: object) -> str:
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 - __str__ is the entrypoint's code, and may raise anything
        return "<str() failed>"


def _restore_limits() -> None:
    """Undo changes of the interpreter's limits that would keep a result from being reported."""
    sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))


if __name__ == "__main__":
    main()
