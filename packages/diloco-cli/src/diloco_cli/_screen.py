"""Standard output and standard error of the command.

Data goes to standard output, everything else to standard error. Colours are only used on a terminal
that wants them; rich is imported for them alone.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

import click

from diloco_protocol import InvalidRequestError

from ._facts import VERSION, Cell, Facts

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """The output of one command.

    Args:
        out: Standard output.
        err: Standard error.
        environ: Environment variables; ``NO_COLOR`` and ``TERM=dumb`` turn colours off.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.out = sys.stdout if out is None else out
        self.err = sys.stderr if err is None else err
        for stream in (self.out, self.err):
            if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks is shown as text
                stream.reconfigure(errors="backslashreplace")
        self.terminal = self.out.isatty()
        self.dumb = environ.get("TERM") == "dumb"
        self.coloured = self.terminal and not environ.get("NO_COLOR") and not self.dumb

    @property
    def width(self) -> int | None:
        """Return the columns of the terminal; None where there is no terminal."""
        return shutil.get_terminal_size().columns if self.terminal else None

    @cached_property
    def console(self) -> Console:
        """The terminal, for what is drawn on it again and again."""
        from rich.console import Console  # slow to import

        return Console(file=self.out, force_terminal=True, highlight=False, markup=False)

    def line(self, *pieces: Cell | str) -> None:
        """Print one line of data. Nothing in it is taken for markup."""
        cells = [Cell(piece) if isinstance(piece, str) else piece for piece in pieces]
        if self.coloured and any(cell.style for cell in cells):
            from rich.text import Text

            self.console.print(Text.assemble(*cells, end=""), soft_wrap=True)
        else:
            self.out.write("".join(cell.text for cell in cells) + "\n")

    def lines(self, lines: Iterable[Iterable[Cell]]) -> None:
        """Print several lines of data."""
        for line in lines:
            self.line(*line)

    def json(self, facts: Facts, *, indent: int | None = 2) -> None:
        """Print facts and their version as JSON; every character beyond ASCII is escaped."""
        versioned = {"version": VERSION, **facts}
        self.out.write(json.dumps(versioned, indent=indent) + "\n")

    def say(self, text: str) -> None:
        """Print a sentence that is not data, to standard error."""
        self.err.write(f"{text}\n")
        self.err.flush()

    def confirm(self, question: str, stdin: Callable[[], TextIO] = lambda: sys.stdin) -> bool:
        """Ask a question on the terminal.

        Raises:
            InvalidRequestError: There is no terminal to ask on.
        """
        if not (stdin().isatty() and self.err.isatty()):
            raise InvalidRequestError(
                "nothing was done: this asks first, and there is no terminal to ask on. Add --yes"
            )
        return click.confirm(question, err=True)
