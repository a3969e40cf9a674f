"""Watch what is called while something is asked.

This shows whether a truth comes from the executor, or from code that the executor judges with.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import diloco_protocol
from diloco_protocol import BaseExecutor, ReplicaState, ReplicaStatus

VERBS = ("poll", "describe", "collect", "attach", "list_runs", "exists", "_observe", "_observe_run")


@dataclass
class Seen:
    """A record of what was called.

    Attributes:
        codes: All Python functions that were called.
        judges: Those that returned a state or a status, with their names.
        tables: The tables of states that were within their reach, by identity, with their names.
    """

    codes: set[CodeType] = field(default_factory=set)
    judges: dict[CodeType, str] = field(default_factory=dict)
    tables: dict[int, str] = field(default_factory=dict)


def watch(call: Callable[[], Any]) -> Seen:
    """Make a call, and record what is called in this thread meanwhile."""
    seen = Seen()

    def look(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event == "call":
            seen.codes.add(code)
            for name in code.co_names:
                if _is_table(table := frame.f_globals.get(name)):
                    seen.tables[id(table)] = name
        elif event == "return" and _judges(frame, value):
            seen.judges[code] = code.co_qualname

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def verbs_in(seen: Seen, executor: BaseExecutor) -> list[str]:
    """Return the verbs of the executor that were called."""
    codes = {
        inspect.unwrap(vars(cls)[name]).__code__: name.lstrip("_")
        for cls in type(executor).__mro__
        for name in VERBS
        if inspect.isfunction(vars(cls).get(name))
    }
    return sorted({name for code, name in codes.items() if code in seen.codes})


def shared(one: Seen, other: Seen) -> list[str]:
    """Return the names of the functions and tables that both take their states from."""
    functions = {name for code, name in one.judges.items() if code in other.judges}
    return sorted(functions | {name for key, name in one.tables.items() if key in other.tables})


def _judges(frame: FrameType, value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    if not any(isinstance(one, (ReplicaState, ReplicaStatus)) for one in values):
        return False
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in {"diloco_conformance", diloco_protocol.__name__, "enum", "dataclasses"}


def _is_table(value: Any) -> bool:
    """Say whether a value maps something to states."""
    if not isinstance(value, Mapping) or not value or len(value) > 100:
        return False
    firsts = [one[0] if isinstance(one, tuple) and one else one for one in value.values()]
    return all(isinstance(one, str) for one in firsts) and set(firsts) <= set(ReplicaState)
