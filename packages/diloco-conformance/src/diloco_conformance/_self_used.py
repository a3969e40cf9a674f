"""Check that the methods of a harness use their arguments.

A method that does not look at a handle does nothing to its replica.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType

from ._blame import fault
from ._harness import Ability, Fault, Harness, Operation
from ._words import HOOKS

#: The methods that do something with each of their arguments, and the ability to declare in
#: ``cannot`` where a world lacks it.
METHODS: dict[str, str | None] = {
    "drive": None,
    "truth": None,
    "advance": None,
    "inject": "inject",
    **{hook: ability for ability, hook in HOOKS.items() if ability is not Ability.DAMAGE},
}


def check_used(harness: Harness) -> None:
    """Check the code of each method.

    Raises:
        HarnessFault: A method never uses an argument, which is named.
    """
    for name, ability in METHODS.items():
        method = getattr(type(harness), name)
        code = getattr(inspect.unwrap(method), "__code__", None)
        if method is getattr(Harness, name) or code is None or _left_out(harness, ability):
            continue
        parameters = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        if Ability.DAMAGE in harness.cannot and name == "lose":
            parameters = parameters[:1]
        unused = [argument for argument in parameters if argument not in _loaded(code)]
        if unused:
            fault(
                harness,
                f"{name}() never uses its argument {unused[0]}, so it cannot do what the suite "
                f"asks of it: see {name} in docs/harness.md, or declare in cannot what this world "
                "cannot do",
                name,
            )


def _left_out(harness: Harness, ability: str | None) -> bool:
    if ability == "inject":
        return any(all(one in harness.cannot for one in words) for words in (Fault, Operation))
    return ability in harness.cannot


def _loaded(code: CodeType) -> set[str]:
    """Return the names whose values a function uses, also in functions within it."""
    names: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD"):
            names.update(step.argval if isinstance(step.argval, tuple) else [str(step.argval)])
    return names
