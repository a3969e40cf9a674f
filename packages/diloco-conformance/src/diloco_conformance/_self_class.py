"""Check that a harness has all that the suite uses: methods, their arguments, attributes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_protocol import InvalidRequestError, entrypoint_name
from diloco_protocol.backend import check_flag, check_json, check_run_prefix, check_seconds

from ._blame import fault
from ._harness import Harness, Step
from ._words import HOOKS

#: The arguments with which the suite calls each method of a harness.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "make_executor": ((), {"env": None, "journal": None, "run_id": None}),
    "drive": ((None, Step.START, None), {}),
    "settle": ((), {}),
    "advance": ((1.0,), {}),
    "truth": ((None,), {}),
    "living": ((), {}),
    "expire": (([],), {}),
    "inject": ((None, None), {"after": 0}),
    "clear": ((), {}),
    "calls": ((), {}),
    "sent": ((), {}),
    "told": ((None,), {}),
    "write": ((None, b"", "stdout"), {}),
    "secret": (("",), {}),
    "labels": ((None,), {}),
    "age": ((1.0,), {}),
    "elsewhere": ((), {}),
    "resources": ((None,), {}),
    "lose": ((None, None), {}),
    "foreign": (("",), {}),
    "remove": ((None,), {}),
    "between": ((None,), {}),
    "now": ((), {}),
    "clock": ((), {}),
    "sleep": ((1.0,), {}),
    "backoff": ((), {}),
    "close": ((), {}),
}


SECONDS = ("timeout", "short_timeout", "overrun", "slack", "resolution", "patience")
NUMBERS = ("many_ranks", "many_runs", "long_log")


def check_class(harness: Harness) -> None:
    """Check the attributes and methods.

    Raises:
        HarnessFault: One is missing, or is of the wrong kind.
    """
    _check_attributes(harness)
    for name, (arguments, options) in CALLS.items():
        _check_method(harness, name, arguments, options)
    for name in dir(type(harness)):
        if not name.startswith("_") and not hasattr(Harness, name):
            _check_name(harness, name)
    _check_left_out(harness)


def _check_attributes(harness: Harness) -> None:
    if not isinstance(getattr(harness, "entrypoint", None), str):
        fault(
            harness,
            "it lacks entrypoint: set it to what is launched, such as entrypoint = "
            '"my_module:my_function"',
        )
    for name in ("entrypoint_args", "cannot"):
        if not isinstance(value := getattr(harness, name), Mapping):
            fault(harness, f"{name} must be a dict, not {value!r}")
    try:
        entrypoint_name(harness.entrypoint)
        check_json(dict(harness.entrypoint_args), "entrypoint_args")
        for name in ("starts_by_itself", "keeps_carriage_returns"):
            check_flag(name, getattr(harness, name))
        check_run_prefix("run_prefix", harness.run_prefix)
        for name in SECONDS:
            check_seconds(name, getattr(harness, name), positive=name == "patience")
    except InvalidRequestError as error:
        fault(harness, str(error))
    if isinstance(harness.gpus, str) or not isinstance(harness.gpus, Sequence):
        fault(harness, f"gpus must be a tuple of texts such as ('H100:2',), not {harness.gpus!r}")
    for name in NUMBERS:
        value = getattr(harness, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            fault(harness, f"{name} must be a whole number from 1 on, not {value!r}")
    if type(harness).sleep is Harness.sleep:
        for name in ("slack", "resolution", "overrun"):
            if (value := getattr(harness, name)) > harness.short_timeout / 4:
                fault(
                    harness,
                    f"{name} is {value:g} s where time is virtual and short_timeout "
                    f"{harness.short_timeout:g} s: with as much as that, nothing late or wrongly "
                    "dated would be noticed",
                )
    if not harness.short_timeout < harness.timeout:
        fault(
            harness,
            f"short_timeout ({harness.short_timeout:g} s) must be shorter than timeout "
            f"({harness.timeout:g} s), which no test reaches",
        )


def _check_method(
    harness: Harness, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    method = getattr(harness, name)
    if not callable(method):
        fault(harness, f"{name} must be a method, not {method!r}")
    try:
        signature = inspect.signature(method)
        signature.bind(*arguments, **options)
    except TypeError as error:
        form = inspect.signature(getattr(Harness, name))
        fault(
            harness, f"{name} is called as {name}{form}, and takes {name}{signature}: {error}", name
        )
    if (
        inspect.iscoroutinefunction(method)
        or inspect.isgeneratorfunction(method)
        or inspect.isasyncgenfunction(method)
    ):
        fault(
            harness,
            f"{name} is a generator or 'async def', so that calling it does nothing: write a "
            "plain method, which returns when its work is done",
            name,
        )


def _check_name(harness: Harness, name: str) -> None:
    """Check that a name that the suite does not know is not one of its names, misspelt."""
    cls = type(harness)
    near = difflib.get_close_matches(name, [*CALLS, *SECONDS, *NUMBERS], 1, 0.85)
    if near and callable(getattr(cls, name)) == callable(getattr(Harness, near[0], None)):
        missing = getattr(cls, near[0], None) is getattr(Harness, near[0], None)
        if missing:
            fault(harness, f"it has {name}, which the suite never uses: is it {near[0]}?", name)


def _check_left_out(harness: Harness) -> None:
    """Check that every method that is missing is left out on purpose, with a reason."""
    silent = {
        ability: hook
        for ability, hook in HOOKS.items()
        if ability not in harness.cannot and getattr(type(harness), hook) is getattr(Harness, hook)
    }
    if silent:
        methods = ", ".join(f"{hook}()" for hook in dict.fromkeys(silent.values()))
        abilities = ", ".join(f"Ability.{ability.name}" for ability in silent)
        fault(
            harness,
            f"it lacks {methods}: write what this world can do, and for the rest declare in "
            f"cannot, each with its reason: {abilities}",
        )
