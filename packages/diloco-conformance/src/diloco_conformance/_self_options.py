"""Check that ``make_executor`` passes on what it is given, by watching the constructor."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from diloco_protocol import BackendError, BaseExecutor, FolderJournal

from ._blame import fault
from ._check_calls import Calls
from ._harness import Harness
from ._promises import PromiseBroken

VARIABLE = "CONF_SELF_CHECK"


def check_options(harness: Harness) -> None:
    """Make an executor with every option that the suite uses.

    Raises:
        HarnessFault: One of them does not reach the constructor. What the constructor does with it
            is for the tests to see.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "env": {VARIABLE: "given"},
            "journal": FolderJournal(Path(folder)),
            "run_id": "conf-given",
        }
        kind, values = _constructed(harness, options)
    for name, value in options.items():
        if not any(_is(one, value) for one in values):
            fault(
                harness,
                f"make_executor({name}={value!r}) does not give {name} to the constructor of "
                f"{kind}: write make_executor(self, **options), and {kind}(…, **options) in it",
                "make_executor",
            )


def _constructed(harness: Harness, options: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the name of the executor's class, and all values that its constructor is given."""
    calls: list[tuple[str, list[Any]]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        first = next(iter(frame.f_locals.values()), None) if event == "call" else None
        if frame.f_code.co_name == "__init__" and isinstance(first, BaseExecutor):
            values = list(frame.f_locals.values())[1:]
            inner = [one for value in values if isinstance(value, dict) for one in value.values()]
            calls.append((type(first).__name__, [*values, *inner]))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        made = harness.make_executor(**options)
    except TypeError:
        if not calls:  # the constructor takes none of them, which is for the tests to say
            return "", list(options.values())
        raise
    finally:
        sys.setprofile(before)
    close(harness, made)
    return calls[0]


def _is(one: Any, value: Any) -> bool:
    """Say whether this is the value that was given; variables may stand among others."""
    if isinstance(value, Mapping):
        return isinstance(one, Mapping) and value.items() <= one.items()
    return one is value


def close(harness: Harness, executor: BaseExecutor) -> None:
    """Close an executor before there is a lab.

    If that hangs or raises, the tests of C8 will say so.
    """
    calls = Calls()
    calls.harness, calls.history, calls.hung = harness, [], False
    with contextlib.suppress(PromiseBroken, BackendError):
        calls.within("C8", executor.close)
