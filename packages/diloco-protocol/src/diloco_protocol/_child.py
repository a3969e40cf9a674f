"""The process in which an entrypoint runs; started by the runner. ``python -m diloco_protocol._child SPEC REPORT``."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ._errors import InvalidRequestError
from ._json import check_json
from ._spec import ReplicaSpec


def main() -> None:
    """Call the entrypoint and report what came of it; exits with the replica's exit code."""
    spec = ReplicaSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    report_path = Path(sys.argv[2])
    sys.argv[1:] = []
    code, report = _call(spec)
    partial = report_path.with_suffix(".partial")
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(report_path)
    sys.exit(code)


def _call(spec: ReplicaSpec) -> tuple[int, dict[str, Any]]:
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
        step = ""
        result = function(**spec.kwargs)
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return 1, {
            "error": f"{step} failed: {text}" if step else text,
            "error_type": type(error).__name__,
            "traceback": traceback.format_exc(),
            "start_failed": bool(step),
        }
    try:
        check_json(result, "result")
    except InvalidRequestError as error:
        text = (
            f"the entrypoint {spec.entrypoint} returned something that cannot be reported: {error}"
        )
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the replica's log
        return 1, {"error": text, "error_type": "InvalidResult"}
    return 0, {"result": result}


def _submodule(module: str, name: str) -> ModuleType | None:
    """A module inside a package; None if there is none. If the module itself cannot be imported, that is an error."""
    full_name = f"{module}.{name}"
    try:
        return importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{full_name}.".startswith(f"{error.name}."):
            return None
        raise


def _exit_code(request: SystemExit) -> tuple[int, dict[str, Any]]:
    """The exit code that the interpreter itself would give a SystemExit."""
    if request.code is None or request.code == 0:
        return 0, {}
    if isinstance(request.code, int):
        code = request.code & 0xFF
        # What the operating system makes of exit(256) is a success, so it is one.
        return code, {
            "error": f"the entrypoint exited with code {code}",
            "error_type": "SystemExit",
        } if code else {}
    print(request.code, file=sys.stderr, flush=True)  # noqa: T201 - stderr is the replica's log
    return 1, {"error": f"the entrypoint exited: {request.code}", "error_type": "SystemExit"}


if __name__ == "__main__":
    main()
