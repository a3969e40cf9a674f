"""The verbs on runs as backends know them: ``ls``, ``status``, ``wait``, ``cancel``, ``purge``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from diloco_protocol import (
    AuthError,
    BaseExecutor,
    DilocoError,
    ForbiddenError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    ThrottledError,
    UnavailableError,
)
from diloco_protocol.backend import cancel_all, is_run_id

from . import _facts, _told
from ._backends import Run
from ._facts import place_in_words, place_of
from ._installed import find_extra
from ._session import Session
from ._texts import clean

_DOES = {"cancel": "ends", "purge": "removes the records, logs and results of"}


def ls(session: Session, limit: int) -> int:
    """Print the newest runs of every backend, and return the exit code.

    Raises:
        UnavailableError: No backend could be asked.
    """
    screen = session.screen
    with session.backends(session.choice) as backends:
        answers = backends.ask(lambda executor: _runs_of(executor, limit))
    notes = answers.notes("asked")
    if not answers.found:
        raise UnavailableError(". ".join(["no backend could be asked", *notes]))
    runs = [facts for some, _ in answers.found.values() for facts in some]
    if session.as_json:
        problems = answers.failed | answers.unset
        backends_facts = [
            {"name": name, "asked": name in answers.found, "problem": problems.get(name)}
            for name in session.choice.names
        ]
        screen.json({"runs": runs, "backends": backends_facts})
    else:
        screen.lines(_facts.table(_facts.RUN_COLUMNS, runs, session.clock(), screen.width))
    for name, (_, older) in answers.found.items():
        if older:
            notes.append(f"{name} has {older} more, which are older: --limit {limit + older}")
    unread = [facts for facts in runs if facts["problem"]]
    notes += [f"{facts['run_id']} on {facts['backend']}: {facts['problem']}" for facts in unread]
    for note in notes:
        screen.say(note)
    return _facts.UNREACHABLE if answers.failed or unread else _facts.SUCCEEDED


def _runs_of(executor: BaseExecutor, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the facts about the newest runs of a backend, and how many older ones there are."""
    names = executor.list_runs()
    runs = []
    for run_id in names[: -limit - 1 : -1]:
        handles, replicas, problem = [], [], None
        try:
            handles = executor.attach(run_id)
            replicas = Run(run_id, "", executor, handles).replicas()
        except ReplicaNotFoundError:
            continue  # it was removed since the list was made
        except DilocoError as error:  # also a record of another version
            problem = clean(str(error))
        started = [row["started_at"] for row in replicas if row["started_at"] is not None]
        facts: dict[str, Any] = {"backend": executor.backend_name, "run_id": clean(run_id)}
        facts |= {"replicas": len(replicas), "problem": problem}
        facts["world_size"] = handles[0].world_size if replicas else 0
        facts["states"] = _facts.counts(row["state"] for row in replicas)
        runs.append({**facts, "started_at": min(started, default=None)})
    return runs, max(0, len(names) - limit)


def status(session: Session, target: str) -> int:
    """Print the state of every replica of a run, and return the exit code."""
    if _told.is_uri(target):
        return _told.status(session, target)
    with session.run(target) as run:
        replicas = run.replicas()
    show_replicas(session, run, replicas)
    return _facts.exit_of_states(facts["state"] for facts in replicas)


def show_replicas(session: Session, run: Run, replicas: list[dict[str, Any]]) -> None:
    """Print the facts about the replicas of a run."""
    facts: dict[str, Any] = {
        **run.names(),
        "world_size": run.handles[0].world_size,
        "states": _facts.counts(row["state"] for row in replicas),
        "replicas": replicas,
    }
    screen = session.screen
    if session.as_json:
        screen.json(facts)
        return
    where = place_in_words(run.backend, facts["place"])
    screen.line(f"{run.run_id}: {_facts.counts_in_words(facts['states'])}, on {where}")
    screen.lines(_facts.replica_lines(replicas, session.clock(), screen.width))


def wait(session: Session, target: str) -> int:
    """Wait until every replica of a run has ended, print how, and return the exit code."""
    with session.run(target) as run:
        shown = [""]

        def progress(known: Mapping[ReplicaHandle, ReplicaStatus]) -> None:
            states = (
                "unknown" if status.reason == "lost" else status.state.value
                for status in known.values()
            )
            text = _facts.counts_in_words(_facts.counts(states))
            if text != shown[-1]:
                session.screen.say(f"{target}: {text}")
                shown.append(text)

        with session.looking("wait", target, run.backend):
            results = run.executor.collect(run.handles, progress=progress)
    replicas = [_facts.result_facts(result) for result in results]
    show_replicas(session, run, replicas)
    lost = any(facts["state"] == "succeeded" and facts["error"] for facts in replicas)
    code = _facts.exit_of_states(facts["state"] for facts in replicas)
    return _facts.UNKNOWN if lost and not code else code


def cancel(session: Session, target: str, *, yes: bool) -> int:
    """End all replicas of a run, or of all that meet at a store; return the exit code."""
    return end(session, "cancel", target, yes=yes)


def purge(session: Session, target: str, *, yes: bool, store: bool) -> int:
    """Remove what a backend has of a run, or what it has in its store; return the exit code.

    Raises:
        InvalidRequestError: ``store`` is given, and the target is no URI, or there is no run.
        DilocoError: As for :func:`end`.
    """
    if not store:
        return end(session, "purge", target, yes=yes)
    if not _told.is_uri(target):
        raise InvalidRequestError(f"purge --store takes the URI of a run's store, not {target!r}")
    session.ask_no_backend()
    remove, screen, uri = find_extra("remove"), session.screen, clean(target)
    totals = remove(uri=target).values
    count = f"{totals['objects']} objects ({float(totals['bytes']) / 1e6:.1f} MB)"
    screen.say(f"this deletes the run in {uri}, its model and its log: {count}")
    if not (yes or screen.confirm(f"purge --store {target}?")):
        screen.say("nothing was done")
        return _facts.BAD_USE
    remove(uri=target, really=True)
    if session.as_json:
        screen.json({"verb": "purge", **totals, "uri": uri})
    else:
        screen.line(f"{count} were deleted")
    return _facts.SUCCEEDED


def end(session: Session, verb: Literal["cancel", "purge"], target: str, *, yes: bool) -> int:
    """End runs, or remove the records of those that have ended, and return the exit code.

    Acts on the replicas that were shown, and not on a run that has taken the name since. A run of
    which all replicas have ended is not cancelled.

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
        runs = _runs_at(session, opened, target)
        over = [run for run in runs if verb == "cancel" and _has_ended(run)]
        for run in runs:
            where = place_in_words(run.backend, place_of(run.handles))
            does = "nothing is done, as all have ended:" if run in over else f"this {_DOES[verb]}"
            screen.say(f"{does} {_count(run)} of run {run.run_id}, on {where}")
        if not (yes or over == runs or screen.confirm(f"{verb} {target}?")):
            screen.say("nothing was done")
            return _facts.BAD_USE
        done: list[dict[str, Any]] = []
        errors: list[DilocoError] = []
        for run in runs:
            try:
                done += [run.names() | {"replicas": 0} if run in over else _act(session, verb, run)]
            except DilocoError as error:  # the other runs may cost money
                errors.append(error)
    if session.as_json and done:
        facts = {"uri": clean(target), "runs": done} if _told.is_uri(target) else done[0]
        screen.json({"verb": verb, **facts})
    for other in errors[1:]:
        errors[0].add_note(f"diloco: {other}")
    if errors:
        raise errors[0]
    return _facts.SUCCEEDED


def _count(run: Run) -> str:
    return f"{len(run.handles)} replica{'s' * (len(run.handles) > 1)}"


def _has_ended(run: Run) -> bool:
    """Say whether all replicas of a run have ended; False if their backend does not say it."""
    with contextlib.suppress(DilocoError):  # the other runs may cost money
        return all(row["state"] in {"succeeded", "failed", "cancelled"} for row in run.replicas())
    return False


def _act(session: Session, verb: str, run: Run) -> dict[str, Any]:
    """Do it to one run, and return the facts about that."""
    if verb == "purge":
        run.executor.purge(run.handles[0])
        text = f"{run.backend} has removed what it had of {_count(run)}"
    else:
        is_gang = run.executor.capabilities.cancel_scope == "gang"
        cancel_all(run.handles[:1] if is_gang else run.handles, run.executor.cancel)
        again = session.choice.again("wait", run.run_id, run.backend)
        text = f"{run.backend} was asked to end {_count(run)}. To wait until they have:\n  {again}"
    if not session.as_json:
        session.screen.line(text)
    return run.names() | {"replicas": len(run.handles)}


def _runs_at(session: Session, opened: contextlib.ExitStack, uri: str) -> list[Run]:
    """Return the run of a name, or those that meet at a store, as their backends say.

    The replicas and a journal there only say for which names to look: anyone may have written them.

    Raises:
        ReplicaNotFoundError: There are none.
        UnavailableError: There are none, and a backend could not be searched.
    """
    if not _told.is_uri(uri):
        return [opened.enter_context(session.run(uri))]
    telemetry, recorded = _told.read_run(_told.open_run(uri), history=False)
    known = {live.run for live in telemetry.live.values()} | {run.run_id for run in recorded.runs}
    names = sorted(filter(is_run_id, known))
    place = _told.spelling(uri if "://" in uri else str(Path(uri).expanduser().absolute()))
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
            spelling = uri and _told.spelling(uri)
            note = f"{called} meets at {clean(uri or 'no place')}"
            notes = () if spelling and spelling == place else (note,)
        except ReplicaNotFoundError:
            continue
        except (AuthError, ForbiddenError, ThrottledError, UnavailableError):
            raise  # no other name would be answered
        except DilocoError as error:  # a damaged record concerns its own run
            handles, notes = [], (f"{called} cannot be read: {clean(str(error))}",)
        runs.append(Run(name, executor.backend_name, executor, handles, notes))
    return runs
