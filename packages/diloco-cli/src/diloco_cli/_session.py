"""Everything that a verb works with, and standard output and standard error.

Data goes to standard output, everything else to standard error. Colours are only used on a terminal
that wants them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TextIO

import click

from diloco_protocol import InvalidRequestError, executor_names

from ._backends import Backends, Choice, Run, read_choice
from ._facts import VERSION, Cell, Facts
from ._texts import clean

INTERRUPTED = 130


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
                stream.reconfigure(errors="backslashreplace", line_buffering=True)
        self.terminal = self.out.isatty()
        self.dumb = environ.get("TERM") == "dumb"
        self.coloured = self.terminal and not environ.get("NO_COLOR") and not self.dumb

    @property
    def width(self) -> int | None:
        """Return the columns of the terminal; None where there is no terminal."""
        return shutil.get_terminal_size().columns if self.terminal else None

    def line(self, *pieces: Cell | str) -> None:
        """Print one line of data."""
        cells = [Cell(piece) if isinstance(piece, str) else piece for piece in pieces]
        self.out.write("".join(map(self._painted, cells)) + "\n")

    def _painted(self, cell: Cell) -> str:
        if not (self.coloured and cell.style):
            return cell.text
        bold = cell.style == "bold"
        return click.style(cell.text, bold=bold or None, fg=None if bold else cell.style)

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


@dataclass(frozen=True)
class Session:
    """One call of the command.

    Attributes:
        backend: ``--backend``.
        given: ``--option``.
        as_json: Whether data is printed as JSON.
        screen: Standard output and standard error.
        clock: Returns the time in Unix seconds.
        backends: Makes the backends.
    """

    backend: str | None = None
    given: Sequence[str] = ()
    as_json: bool = False
    screen: Screen = field(default_factory=Screen)
    clock: Callable[[], float] = time.time
    backends: Callable[[Choice], Backends] = Backends

    @cached_property
    def choice(self) -> Choice:
        """The backends that may be used.

        Raises:
            InvalidRequestError: What was given does not say which.
        """
        return read_choice(self.backend, self.given, os.environ, executor_names())

    def ask_no_backend(self) -> None:
        """Refuse the options of backends.

        Raises:
            InvalidRequestError: Some were given.
        """
        if self.backend or self.given:
            raise InvalidRequestError(
                "--backend and --option are for runs by name: a URI asks no backend"
            )

    @contextlib.contextmanager
    def run(self, run_id: str) -> Iterator[Run]:
        """Find a run, and say which backends could not be searched."""
        with self.backends(self.choice) as backends:
            run = backends.find(run_id)
            for note in run.notes:
                self.screen.say(note)
            yield run

    @contextlib.contextmanager
    def looking(
        self, verb: str, run: str, backend: str | None, more: Sequence[str] = ()
    ) -> Iterator[None]:
        """Let Ctrl-C end a verb that only looks, and say that the run goes on and how to come back.

        Args:
            verb: The verb.
            run: The run that it looks at, as it was given.
            backend: The backend to name.
            more: Further words to come back with.

        Raises:
            Exit: It was Ctrl-C.
        """
        try:
            yield
        except KeyboardInterrupt:
            again = self.choice.again(verb, run, backend, more)
            self.screen.say(f"run {clean(run)} is left as it is. Come back with:\n  {again}")
            raise click.exceptions.Exit(INTERRUPTED) from None
