"""Verbs that a package adds to the command ``diloco`` (the package diloco-cli).

A package describes such a verb as a backend describes its constructor, with a class of
:class:`Options`, and names it in the entry-point group ``diloco.commands``::

    @command(ExportOptions)
    def export(options):
        \"\"\"Write the model of a run to a file.\"\"\"
        ...
        return Answer({"outer_steps": steps}, (f"the model after {steps} outer steps",))

On the command line, options without a default are arguments, in their order, and the others are
written ``--name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ._hooks import Option
from ._options import Options, options_of

T = TypeVar("T", bound=Options)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a verb.

    Attributes:
        values: JSON values by name, for programs.
        lines: The same in sentences, for people.
    """

    values: Mapping[str, Any]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A verb: a function whose options are described. Called with them, by name.

    Attributes:
        takes: The class of its options.
        run: The function, which is called with an instance of that class.
    """

    takes: type[Options]
    run: Callable[[Any], Answer]

    @property
    def help(self) -> str:
        """Return the docstring of the function; empty if Python has removed the docstrings."""
        return inspect.getdoc(self.run) or ""

    def options(self) -> list[Option]:
        """Return the options, in order."""
        return options_of(self.takes)

    def __call__(self, **values: Any) -> Answer:
        """Check the options, and call the function.

        Raises:
            InvalidRequestError: A value is not allowed.
            DilocoError: The function raised it.
        """
        return self.run(self.takes(**values))


def command(options: type[T]) -> Callable[[Callable[[T], Answer]], Command]:
    """Make a :class:`Command` of a function that takes an instance of a class of options."""
    return lambda run: Command(options, run)
