"""Everything that a verb works with."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from click.exceptions import Exit

from diloco_protocol import InvalidRequestError

from ._backends import Backends, Run
from ._options import Choice, read_choice
from ._screen import Screen
from ._texts import clean

INTERRUPTED = 130


@dataclass(frozen=True)
class Session:
    """One call of the command.

    Attributes:
        backend: ``--backend``.
        given: ``--option``.
        as_json: Whether data is printed as JSON.
        screen: Standard output and standard error.
        clock: Returns the time in Unix seconds.
        needed: Whether a backend has to be installed, also where none is named.
        backends: Makes the backends.
    """

    backend: str | None = None
    given: Sequence[str] = ()
    as_json: bool = False
    needed: bool = True
    screen: Screen = field(default_factory=Screen)
    clock: Callable[[], float] = time.time
    backends: Callable[[Choice], Backends] = Backends

    @cached_property
    def choice(self) -> Choice:
        """The backends that may be used.

        Raises:
            InvalidRequestError: What was given does not say which.
        """
        return read_choice(self.backend, self.given, os.environ, needed=self.needed)

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
            raise Exit(INTERRUPTED) from None
