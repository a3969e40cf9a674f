"""The verb ``watch``: a table that follows a run, or lines where there is no terminal."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from diloco_protocol import DilocoError, ReplicaStatus, UnavailableError, telemetry

from . import _told, _view
from ._backends import PATIENCE, Run, in_thread
from ._facts import Cell, Facts, exit_of_states
from ._session import Session
from ._texts import clean, ranks_in_words

T = TypeVar("T")
Launch = tuple[str, str]  # a run_id, and the backend that has it
Statuses = dict[int, ReplicaStatus | None]
Syncs = tuple[int | None, list[tuple[int, telemetry.SyncLine]]]

_MOST_LAUNCHES = 8
_RETRY = 60.0  # seconds until a launch that was not found is searched for again
_QUIET_PUTS = 3  # live objects that have not come until a rank counts as silent
_MOST_OBJECTS, _MOST_BYTES = 50, 4 * 1024 * 1024  # of the history of one rank


@dataclass
class Source(Generic[T]):
    """Something that is asked again and again, in a thread, and may be silent.

    Args:
        name: What is said of it where it does not answer.
        question: Returns the answer.
        clock: Returns the time in Unix seconds.
        retry: Seconds until it is asked again after an error, if it has never answered.

    Attributes:
        value: The last answer; None before the first one.
        since: When it came, or when the source was first named.
        error: Why the last question has no answer; None if it has one.
    """

    name: str
    question: Callable[[], T]
    clock: Callable[[], float]
    retry: float = 0.0
    value: T | None = None
    error: DilocoError | None = None
    _asked: Future[T] | None = None
    _next: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.clock()

    def ask(self, patience: float) -> None:
        """Ask, and wait for so many seconds; what is still unanswered is not asked again.

        There is no waiting for a source that was late before.

        Raises:
            Exception: What the question raised, if it is no error of the protocol.
        """
        if self._asked is None:
            if self.clock() < self._next:
                return
            self._asked = in_thread(self.question)
            wait([self._asked], patience)
        if not self._asked.done():
            self.error = UnavailableError("it does not answer")
            return
        future, self._asked, self.error = self._asked, None, None
        try:
            self.value, self.since = future.result(), self.clock()
        except DilocoError as error:
            self.error = error
            self._next = self.clock() + (self.retry if self.value is None else 0.0)

    @property
    def note(self) -> str:
        """A sentence on what is wrong with it, and since when; empty if it has answered."""
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return clean(f"{self.name} since {since}: {self.error}") if self.error else ""


@dataclass
class Watcher:
    """Looks at a run again and again.

    Args:
        session: The clock, and the backends that may be asked.
        name: The run, as it was given.
        run: The run, if it was named by its name. Then only its backend says how it ends, and its
            ranks tell what they do in it.
        store: Its store, if it is known.
        every: Seconds between two looks.
        opened: Closes backends.
        problem: Why its store is not read.
    """

    session: Session
    name: str
    run: Run | None
    store: _told.Store | None
    every: float
    opened: contextlib.ExitStack
    problem: str = ""
    _launches: dict[Launch, Source[Statuses]] = field(default_factory=dict)
    _launch_of: dict[int, Launch] = field(default_factory=dict)
    _ends: dict[int, ReplicaStatus] = field(default_factory=dict)
    _seen: dict[int, _view.Seen] = field(default_factory=dict)
    _facts: Facts = field(default_factory=dict)
    _looked: float | None = None
    _syncs_of: int | None = None
    _syncs_at: float = 0.0
    _size: int = 0

    def __post_init__(self) -> None:
        if self.run:
            self._size = self.run.handles[0].world_size
            self._add((self.run.run_id, self.run.backend), self.run)
        if (store := self.store) is None:
            return
        live = telemetry.RunReader(store.list_keys, store.read)
        history = telemetry.RunReader(self._history_keys, store.read, most_bytes=_MOST_BYTES)
        made = partial(Source, clock=self.session.clock)
        self._live = made("the store is silent", partial(live.look, history=False))
        self._live.value = _told.NOTHING if self.run else None
        self._syncs = made("the history in the store is silent", partial(self._read_syncs, history))
        self._journal = made(
            "the journal in the store is silent", partial(_told.Recorded, store, {})
        )

    def look(self) -> _view.View:
        """Look once: at what ranks tell, at the backends, and at the syncs when they are due.

        Raises:
            UnavailableError: The store cannot be read, at the first look.
            SpecVersionError: The replicas are of another version.
        """
        if self.store:
            self._look_at_live()
        for source in self._launches.values():
            source.ask(self.every)
        rows = self._rows()
        rank, syncs = self._look_at_syncs(rows) if self.store else (None, [])
        notes = list(filter(None, self._notes()))
        return _view.View(self.name, rows, syncs, rank, notes, self.session.clock())

    def _add(self, launch: Launch, run: Run | None = None) -> None:
        """Begin to look at a launch in its backend, which is searched for at the first look."""
        match = run

        def statuses() -> Statuses:
            nonlocal match
            match = match or self._find(*launch)
            seen = match.executor.describe_run(match.handles)
            return {handle.rank: seen.get(handle) for handle in match.handles}

        if launch not in self._launches and len(self._launches) < _MOST_LAUNCHES:
            name = f"{launch[1] or 'every backend'} is silent about {launch[0]}"
            retry = 0.0 if run else _RETRY
            self._launches[launch] = Source(name, statuses, self.session.clock, retry)

    def _find(self, run_id: str, name: str) -> Run:
        choice = self.session.choice
        if name:
            choice = replace(choice, backend=name, names=(name,))
        with contextlib.ExitStack() as opened:
            run = opened.enter_context(self.session.backends(choice)).find(run_id)
            self.opened.push(opened.pop_all())
        return run

    def _history_keys(self, folder: str) -> Iterator[tuple[str, object]]:
        if self.store and folder == "history/":
            listed = dict(self.store.list_keys(f"history/{self._syncs_of:05}/"))
            for key in telemetry.newest_keys(listed)[-_MOST_OBJECTS:]:
                yield key.key, listed[key.key]

    def _read_syncs(self, reader: telemetry.RunReader) -> Syncs:
        """Return the rank, and its newest syncs in their order, each with its incarnation."""
        rank, history = self._syncs_of, reader.look().history
        return rank, [(key.epoch, line) for key, part in history.items() for line in part.lines]

    def _look_at_live(self) -> None:
        self._live.ask(self.every if self.run or self._looked is not None else PATIENCE)
        answer, error = self._live.value, self._live.error
        if answer is None:
            raise error or UnavailableError(f"{self.name} does not answer")
        if error is None:
            if answer.live or self.run:
                self._facts = _told.run_facts(self.name, answer)
                self._size = self._size if self.run else self._facts["world_size"]
            self._look_at_journal(answer)
            replicas = self._facts.get("replicas", ())
            self._seen = _view.see(self._seen, replicas, self._live.since, self._looked)
            self._looked = self._live.since
        for rank, live in ({} if self.run else answer.live).items():
            self._launch_of[rank] = live.run, live.backend
        names = self.session.choice.names
        for run, backend in dict.fromkeys(self._launch_of.values()):
            if run and (backend in names if backend else names):
                self._add((run, backend))

    def _look_at_journal(self, answer: telemetry.Told) -> None:
        """Read the journal where no rank tells of itself, as often as replicas write history."""
        now = self.session.clock()
        if answer.live or self.run:
            self._ends = {}
        elif now >= self._syncs_at:
            self._syncs_at = now + telemetry.history_seconds(self._size)
            self._journal.ask(self.every)
            if (recorded := self._journal.value) is None or not recorded.handles:
                _told.check_version(self.name, answer)
                return
            self._size = max(handle.world_size for handle in recorded.handles.values())
            for rank, handle in recorded.handles.items():
                self._launch_of[rank] = handle.run_id, handle.backend_name
            self._ends = {handle.rank: end for handle, end in recorded.ends.items()}

    def _rows(self) -> list[dict[str, Any]]:
        looked = self._looked or 0.0  # while the store is silent, no further rank counts as silent
        quiet = _QUIET_PUTS * telemetry.live_seconds(self._size) + self.every
        return [
            _view.rank_facts(rank, self._seen.get(rank), self._word(rank), looked, quiet)
            for rank in range(self._size)
        ]

    def _word(self, rank: int) -> _view.Word | None:
        """Return what the backend says of a rank, in the launch that the rank has named.

        Where none says anything, it is the end that the journal has.
        """
        word, named = None, self._launch_of.get(rank)
        for launch, source in self._launches.items():
            if named in {None, launch} and rank in (source.value or {}):
                since = None if source.error is None else source.since
                word = _view.Word((source.value or {})[rank], since)
                break
        if rank in self._ends and (word is None or word.status is None):
            return _view.Word(self._ends[rank])
        return word

    def _look_at_syncs(self, rows: Sequence[Facts]) -> Syncs:
        """Return the syncs of one rank, read as often as replicas write them, and at the end."""
        before, now = self._syncs_of, self.session.clock()
        rank = _view.choose_rank(rows, before)
        is_due = rank != before or now >= self._syncs_at or all(map(_view.is_over, rows))
        if rank is not None and is_due and self._live.error is None:
            self._syncs_at = now + telemetry.history_seconds(self._size)
            self._syncs_of = rank
            self._syncs.ask(self.every)
        return self._syncs.value or (None, [])

    def _notes(self) -> Iterator[str]:
        yield from (source.note for source in self._launches.values())
        yield self.problem
        if self.store:
            yield self._live.note or self._syncs.note
            yield self._journal.note
        if self._ends:
            yield f"ended, as the journal in the store says: {ranks_in_words(self._ends)}"
        yield from _told.unread(self._facts) if self._facts else ()


def watch(
    session: Session, target: str, every: float, *, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Show a run until all its replicas have ended, and return the exit code.

    Raises:
        ReplicaNotFoundError: There is no run.
        UnavailableError: The store or the backend cannot be reached, at the first look.
        Exit: Ctrl-C ended the command; the run goes on.
    """
    with contextlib.ExitStack() as opened:
        run = None if _told.is_uri(target) else opened.enter_context(session.run(target))
        store, problem = None, ""
        try:
            store = _told.store_of(run) if run else _told.open_run(target)
        except DilocoError as error:
            if not run:
                raise
            problem = f"the store is not read: {clean(str(error))}"
        again = ["--every", f"{every:g}"] * (every != 5)  # which is what it is if left out
        opened.enter_context(session.looking("watch", target, session.choice.backend, again))
        watcher = Watcher(session, clean(target), run, store, every, opened, problem)
        show = opened.enter_context(_painter(session))
        while not (view := watcher.look()).is_over:
            show(view)
            sleep(every)
        show(view)
        return exit_of_states(row["state"] for row in view.rows)


@contextlib.contextmanager
def _painter(session: Session) -> Iterator[Callable[[_view.View], None]]:
    """Yield what shows a view: on a terminal as a table, elsewhere what has changed, as lines."""
    screen = session.screen
    if session.as_json or not screen.terminal or screen.dumb:
        shown: _view.View | None = None

        def tell(view: _view.View) -> None:
            nonlocal shown
            before, shown = shown, view
            for facts, words in _view.changes(before, view):
                if session.as_json:
                    screen.json(facts, indent=None)
                elif words:
                    screen.line(words)

        yield tell
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(file=screen.out, force_terminal=True, highlight=False, markup=False)
    blocks = _view.ASCII_BLOCKS if console.options.ascii_only else _view.BLOCKS

    def line(cells: Sequence[Cell]) -> Text:
        styled = cells if screen.coloured else [Cell(cell.text) for cell in cells]
        return Text.assemble(*styled, no_wrap=True, overflow="crop")

    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield lambda view: live.update(
            Group(*map(line, _view.screenful(view, *shutil.get_terminal_size(), blocks))),
            refresh=True,
        )
