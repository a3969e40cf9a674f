"""Handles that no launch has made: H10."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
)

from ._harness import Ability, Step, Truth
from ._lab import Lab
from ._model import Run
from ._refusals import must_raise
from ._suite_names import verbs

RUN_ID = "run_id"
MOST = 5
"""If at most this many texts of two handles differ, they are mixed in every way.

Of more texts, each one is taken alone, and all but each one.
"""
WORDS = (
    *("", ".", "..", "../..", "/", "*", "%", "a/b c", "-x", "Ü", "%2e%2e%2f",
      "0", "-1", "1e9", "null", "{}"),
    *("\0", "a\nb", "\ud800", "x" * 5000, "9" * 5000),
)  # fmt: skip
"""Texts with a special meaning in paths, patterns, URLs, headers, numbers or encodings."""

LOOKED_AFTER = ("collect", "cancel", "purge")
"""The verbs after which the world is checked.

They are the last of those that read, and those that end or remove something.
"""


def changed(handle: ReplicaHandle, texts: dict[str, str]) -> ReplicaHandle:
    """Return the handle with other texts: run_id under that name, metadata under their keys."""
    metadata = {**handle.metadata, **{key: text for key, text in texts.items() if key != RUN_ID}}
    return replace(handle, metadata=metadata, run_id=texts.get(RUN_ID, handle.run_id))


def mixtures(one: ReplicaHandle, other: ReplicaHandle) -> Iterator[tuple[str, ...]]:
    """Yield the names of the texts to take from the other handle.

    They are some of those in which the two differ, and never all.
    """
    names = [key for key in one.metadata if other.metadata.get(key) != one.metadata[key]]
    names.append(RUN_ID)
    sizes = range(1, len(names)) if len(names) <= MOST else (1, len(names) - 1)
    for size in sizes:
        yield from combinations(names, size)


def texts_of(handle: ReplicaHandle) -> dict[str, str]:
    """Return all texts of a handle."""
    return {**handle.metadata, RUN_ID: handle.run_id}


class Pair:
    """Two runs that know different things; a forged handle may touch only the one that it names.

    Args:
        lab: The lab in which they are launched.
        over: Whether they have ended; otherwise they live.
    """

    def __init__(self, lab: Lab, *, over: bool) -> None:
        self._lab, self._over = lab, over
        self.mine, self.theirs = self._up(), self._up()
        self._begin()

    def _up(self) -> Run:
        lab = self._lab
        run = lab.up(1)
        if lab.can(Step.PRINT):
            lab.drive(run.replicas[0], Step.PRINT, [_known(run)])
        if self._over:
            lab.drive(run.replicas[0], Step.SUCCEED, _known(run))
        return run

    def _begin(self) -> None:
        self._lab.harness.settle()
        self._truths = {run.name: self._truth(run) for run in (self.mine, self.theirs)}
        self._strangers = self._others_alive()
        self._named: list[Run] = []

    def renew(self) -> None:
        """Replace each run that has changed, so that two live at most.

        One that a handle has named may have changed.
        """
        changed = [run for run in self._named if self._truth(run) != self._truths[run.name]]
        if not changed:
            return
        for run in changed:
            with contextlib.suppress(ReplicaNotFoundError):
                cancel = partial(self._lab.executor.cancel, run.handles[0])
                self._lab.within("H10", cancel)
        self._lab.harness.settle()
        if self.mine in changed:
            self.mine = self._up()
        if self.theirs in changed:
            self.theirs = self._up()
        self._begin()

    def take(self, handle: ReplicaHandle) -> None:
        """Give a handle to every verb: only the run that it names may change, or be shown."""
        lab = self._lab
        named = [run for run in (self.mine, self.theirs) if run.run_id == handle.run_id]
        self._named += [run for run in named if run not in self._named]
        for verb, call in verbs(lab.executor, handle).items():
            text = (
                f"{verb}(a handle of {_short(handle.run_id)} with {_short(dict(handle.metadata))})"
            )
            lab.note(text, verb)
            gave: Any = None
            try:
                gave = lab.within("H10", call)
            except BackendError:
                pass  # any BackendError is a named error
            else:
                if named and verb in LOOKED_AFTER:
                    lab.harness.settle()
            text += f" gave {_short(gave)}"
            for run in (self.mine, self.theirs):
                if run not in named and _known(run) in repr(gave):
                    lab.broken("H10", text, f"only a handle of {run.name} shows that")
            if verb in LOOKED_AFTER:
                self._look(named, text)
            lab.history.pop()  # among hundreds, the one that matters is easier to see

    def end(self) -> None:
        """Check that calls that were still under way have changed nothing either."""
        self._lab.harness.settle()
        self._look(self._named, "the last of these calls")

    def _look(self, named: list[Run], text: str) -> None:
        for run in (self.mine, self.theirs):
            if run in named:
                continue
            if (now := self._truth(run)) != (truth := self._truths[run.name]):
                self._lab.broken("H10", text, f"{run.replicas[0]} was {truth}, and is {now}")
        if (alive := self._others_alive()) != self._strangers:
            self._lab.broken(
                "H10", text, f"{self._strangers} others lived before it, and now {alive}"
            )

    def _truth(self, run: Run) -> Truth:
        return self._lab.harness.truth(run.handles[0])

    def _others_alive(self) -> int:
        own_alive = sum(self._truth(run).alive for run in (self.mine, self.theirs))
        return self._lab.harness.living() - own_alive


class Forgeries:
    """Fixed tests of H10."""

    def test_h10_a_handle_of_two_runs(self, lab: Lab) -> None:
        """Mix in texts of another run: only the run that the handle names may change.

        No other run may be shown, either.
        """
        for over in (False, True):
            pair = Pair(lab, over=over)
            for names in list(mixtures(pair.mine.handles[0], pair.theirs.handles[0])):
                pair.renew()
                texts = texts_of(pair.theirs.handles[0])
                pair.take(changed(pair.mine.handles[0], {name: texts[name] for name in names}))
            pair.end()

    def test_h10_a_handle_of_any_text(self, lab: Lab) -> None:
        """Put any text into a handle: other runs live on, and every error is a BackendError."""
        name = lab.up(1).run_id  # of a third run, to which no handle in this test leads
        pair = Pair(lab, over=False)
        names = (lab.harness.run_prefix, f"../{name}", f"x/../{name}", f"{name}\0", f"{name} ")
        words: tuple[str, ...] = (*WORDS, name, *names)
        if (
            lab.harness.starts_by_itself
        ):  # replicas are real, and each of hundreds of pairs takes its time
            words = words[::6]
        for word in words:
            texts = texts_of(pair.mine.handles[0])
            whole = {key: text.replace(texts[RUN_ID], word) for key, text in texts.items()}
            for change in [*({key: word} for key in texts), whole]:
                pair.renew()
                pair.take(changed(pair.mine.handles[0], change))
        pair.end()

    def test_h10_a_run_id_of_any_text(self, lab: Lab) -> None:
        """Give any text to the verbs that take a run_id: it must find nothing and end nothing."""
        run = lab.up(1)
        words: list[Any] = [*WORDS, lab.harness.run_prefix, f"../{run.run_id}", f"{run.run_id}\0"]
        for word in [*words, None, 0, [run.run_id], run.run_id.encode()]:
            for verb in ("attach", "cancel_run", "exists"):
                lab.note(f"{verb}({_short(word)})")
                try:
                    gave = lab.within("H10", lambda v=verb, w=word: getattr(lab.executor, v)(w))  # type: ignore[misc]
                except (InvalidRequestError, ReplicaNotFoundError):
                    continue
                except BackendError as error:
                    lab.broken("H10", f"{verb} raised {error!r}", "there can be no such run")
                if gave is not False:
                    lab.broken("H10", f"{verb} gave {gave!r}", "there can be no such run")
        lab.settle()
        lab.observe_all()

    def test_h10_what_is_no_handle_is_refused(self, lab: Lab) -> None:
        """Give every verb a handle's dictionary, its JSON, its run_id, or nothing."""
        run = lab.up(1)
        handle = run.handles[0]
        for wrong in (handle.to_dict(), handle.to_json(), handle.run_id, [handle], 0, None):
            for verb, call in verbs(lab.executor, wrong).items():  # type: ignore[arg-type]
                lab.note(f"{verb}({_short(wrong)})")
                must_raise(lab, "H10", verb, call, InvalidRequestError, "that is no handle")
        lab.observe_all()

    def test_h10_a_handle_leads_only_to_what_is_ours(self, lab: Lab) -> None:
        """Name something else in the same place, with or without a run's ids.

        It must not be touched.
        """
        lab.needs(Ability.FOREIGN)
        name = f"{lab.harness.run_prefix}-foreign"
        lab.harness.foreign(name)
        lab.note(f"there is something else by the name of {name!r}", "foreign")
        pair = Pair(lab, over=False)
        texts = texts_of(handle := pair.mine.handles[0])
        named = {key: text.replace(texts[RUN_ID], name) for key, text in texts.items()}
        for empty in [{}, *({key: ""} for key in handle.metadata)]:
            pair.take(changed(handle, {**named, **empty}))
        pair.end()


def _known(run: Run) -> str:
    return f"known to {run.name} alone."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:100]}…"
