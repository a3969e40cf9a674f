"""The verbs that change something: ``cancel`` and ``purge``. Both say what, and ask."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from diloco_protocol import (
    AuthError,
    BaseExecutor,
    DilocoError,
    ForbiddenError,
    InvalidRequestError,
    ReplicaNotFoundError,
    ThrottledError,
    UnavailableError,
)
from diloco_protocol.backend import cancel_all, is_run_id

from ._backends import Run
from ._exits import BAD_USE, SUCCEEDED
from ._extra import find_extra
from ._facts import place_in_words, place_of
from ._session import Session
from ._store import is_uri
from ._texts import clean
from ._told import read_run

_SCOPES = {
    "cancel": "ends {count} of run {run_id}",
    "purge": "removes the records, logs and results of {count} of run {run_id}",
}


def purge(session: Session, target: str, *, yes: bool, store: bool) -> int:
    """Remove what a backend has of a run, or what it has in its store; return the exit code.

    Raises:
        InvalidRequestError: ``store`` is given, and the target is no URI, or there is no run.
        DilocoError: As for :func:`end`.
    """
    if not store:
        return end(session, "purge", target, yes=yes)
    if not is_uri(target):
        raise InvalidRequestError(f"purge --store takes the URI of a run's store, not {target!r}")
    session.ask_no_backend()
    remove, screen, uri = find_extra("remove"), session.screen, clean(target)
    found = remove(uri=target).values
    count = f"{found['objects']} objects ({float(found['bytes']) / 1e6:.1f} MB)"
    screen.say(f"this deletes the run in {uri}, its model and its log: {count}")
    if not (yes or screen.confirm(f"purge --store {target}?")):
        screen.say("nothing was done")
        return BAD_USE
    remove(uri=target, really=True)
    if session.as_json:
        screen.json({"verb": "purge", **found, "uri": uri})
    else:
        screen.line(f"{count} were deleted")
    return SUCCEEDED


def end(session: Session, verb: Literal["cancel", "purge"], target: str, *, yes: bool) -> int:
    """End runs, or remove the records of those that have ended, and return the exit code.

    Acts on the replicas that were shown, and not on a run that has taken the name since.

    Args:
        session: The backends, and where to say what is done.
        verb: What to do.
        target: The name of a run, or the URI of a store for all runs that meet there.
        yes: Whether not to ask.

    Raises:
        ReplicaNotFoundError: There is no such run.
        UnavailableError: No such run was found, and a backend could not be searched.
        DilocoError: It could not be done; the others of several runs were acted on all the same.
    """
    screen = session.screen
    with contextlib.ExitStack() as opened:
        if is_uri(target):
            runs = _meeting(session, opened, target)
        else:
            runs = [opened.enter_context(session.run(target))]
        for run in runs:
            scope = _SCOPES[verb].format(count=_count(run), run_id=run.run_id)
            screen.say(f"this {scope}, on {place_in_words(run.backend, place_of(run.handles))}")
        if not (yes or screen.confirm(f"{verb} {target}?")):
            screen.say("nothing was done")
            return BAD_USE
        done: list[dict[str, Any]] = []
        errors: list[DilocoError] = []
        for run in runs:
            try:
                done.append(_act(session, verb, run))
            except DilocoError as error:  # the other runs may cost money
                errors.append(error)
    if session.as_json and done:
        facts = {"uri": clean(target), "runs": done} if is_uri(target) else done[0]
        screen.json({"verb": verb, **facts})
    for other in errors[1:]:
        errors[0].add_note(f"diloco: {other}")
    if errors:
        raise errors[0]
    return SUCCEEDED


def _count(run: Run) -> str:
    return f"{len(run.handles)} replica{'s' * (len(run.handles) > 1)}"


def _act(session: Session, verb: str, run: Run) -> dict[str, Any]:
    """Do it to one run, and return the facts about that."""
    if verb == "purge":
        run.executor.purge(run.handles[0])
        text = f"{run.backend} has removed what it had of {_count(run)}"
    else:
        if run.executor.capabilities.cancel_scope == "gang":
            run.executor.cancel(run.handles[0])
        else:
            cancel_all(run.handles, run.executor.cancel)
        again = session.choice.again("wait", run.run_id, run.backend)
        text = f"{run.backend} was asked to end {_count(run)}. To wait until they have:\n  {again}"
    if not session.as_json:
        session.screen.line(text)
    place, count = place_of(run.handles), len(run.handles)
    return {"run_id": run.run_id, "backend": run.backend, "place": place, "replicas": count}


def _meeting(session: Session, opened: contextlib.ExitStack, uri: str) -> list[Run]:
    """Return the runs that meet at a store, as their backends say.

    The replicas and a journal there only say for which names to look: anyone may have written them.

    Raises:
        ReplicaNotFoundError: There are none.
        UnavailableError: There are none, and a backend could not be searched.
    """
    told, recorded = read_run(uri, history=False)
    known = {live.run for live in told.live.values()} | {run.run_id for run in recorded.runs}
    names = sorted(filter(is_run_id, known))
    place = _spelling(uri if "://" in uri else str(Path(uri).expanduser().absolute()))
    backends = opened.enter_context(session.backends(session.choice))
    answers = backends.ask(lambda executor: _look(executor, names, place))
    runs = [run for some in answers.found.values() for run in some]
    notes = [*answers.notes("searched"), *(note for run in runs for note in run.notes)]
    if not (meeting := [run for run in runs if not run.notes]):
        searched = ", ".join(answers.found)
        looked = f"looked on {searched or 'no backend'} for {', '.join(names) or 'no name'}"
        is_known = searched and not answers.failed and all(run.handles for run in runs)
        kind = ReplicaNotFoundError if is_known else UnavailableError
        raise kind(". ".join([f"no run meets at {clean(uri)} by its own record: {looked}", *notes]))
    for note in notes:
        session.screen.say(note)
    return meeting


def _look(executor: BaseExecutor, names: list[str], place: str | None) -> list[Run]:
    """Return the runs of these names that a backend has.

    Those with notes do not meet there, or cannot be read; then they have no handles.
    """
    runs = []
    for name in names:
        called = f"run {name} on {executor.backend_name}"
        try:
            handles = executor.attach(name)
            uri = executor.meets_at(handles[0])  # as all of its launch
            own = uri and _spelling(uri)
            note = f"{called} meets at {clean(uri or 'no place')}"
            notes = () if own and own == place else (note,)
        except ReplicaNotFoundError:
            continue
        except (AuthError, ForbiddenError, ThrottledError, UnavailableError):
            raise  # no other name would be answered
        except DilocoError as error:  # a damaged record concerns its own run
            handles, notes = [], (f"{called} cannot be read: {clean(str(error))}",)
        runs.append(Run(name, executor.backend_name, executor, handles, notes))
    return runs


def _spelling(uri: str) -> str | None:
    """Return a place in one spelling, as diloco-core compares them; None for a relative path.

    >>> _spelling("fsspec+s3://bucket/run-1/"), _spelling("file:///a/b/"), _spelling("b")
    ('s3://bucket/run-1', '/a/b', None)
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        return f"{scheme.rpartition('+')[2]}://{rest.rstrip('/')}"
    path = Path(unquote(urlsplit(uri).path) if separator else uri)
    return str(path) if path.is_absolute() else None
