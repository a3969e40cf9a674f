"""The verbs that show runs as their backends know them: ``ls``, ``status`` and ``wait``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_protocol import (
    BaseExecutor,
    DilocoError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    UnavailableError,
)

from . import _facts, _told
from ._backends import Run
from ._exits import SUCCEEDED, UNKNOWN, UNREACHABLE, exit_of_states
from ._session import Session
from ._store import is_uri
from ._texts import clean


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
    runs = [
        {"backend": name, **facts} for name, (some, _) in answers.found.items() for facts in some
    ]
    if session.as_json:
        problems = {**dict.fromkeys(answers.found), **answers.failed, **answers.unset}
        backends_facts = [
            {"name": name, "asked": name in answers.found, "problem": problems[name]}
            for name in session.choice.names
        ]
        screen.json({"runs": runs, "backends": backends_facts})
    else:
        screen.lines(_facts.table(_facts.RUN_COLUMNS, runs, session.clock(), screen.width))
    for name, (_, older) in answers.found.items():
        if older:
            notes.append(f"{name} has {older} more, which are older: --limit {limit + older}")
    unread = [facts for facts in runs if facts["problem"]]
    notes += [f"{each['run_id']} on {each['backend']}: {each['problem']}" for each in unread]
    for note in notes:
        screen.say(note)
    return UNREACHABLE if answers.failed or unread else SUCCEEDED


def _runs_of(executor: BaseExecutor, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the facts about the newest runs of a backend, and how many older ones there are."""
    names = executor.list_runs()
    found = []
    for run_id in names[: -limit - 1 : -1]:
        handles, replicas, problem = [], [], None
        try:
            handles = executor.attach(run_id)
            replicas = Run(run_id, "", executor, handles).replicas()
        except ReplicaNotFoundError:
            continue  # it was removed since the list was made
        except DilocoError as error:  # also a record of another version
            problem = clean(str(error))
        started = [each["started_at"] for each in replicas if each["started_at"] is not None]
        facts = {"run_id": clean(run_id), "replicas": len(replicas), "problem": problem}
        facts["world_size"] = handles[0].world_size if replicas else 0
        facts["states"] = _facts.counts(each["state"] for each in replicas)
        found.append({**facts, "started_at": min(started, default=None)})
    return found, max(0, len(names) - limit)


def status(session: Session, run_id: str) -> int:
    """Print the state of every replica of a run, and return the exit code."""
    if is_uri(run_id):
        return _told.status(session, run_id)
    with session.run(run_id) as run:
        replicas = run.replicas()
    show_replicas(session, run, replicas)
    return exit_of_states(facts["state"] for facts in replicas)


def show_replicas(session: Session, run: Run, replicas: list[dict[str, Any]]) -> None:
    """Print the facts about the replicas of a run."""
    facts: dict[str, Any] = {
        "run_id": run.run_id,
        "backend": run.backend,
        "place": _facts.place_of(run.handles),
        "world_size": run.handles[0].world_size,
        "states": _facts.counts(each["state"] for each in replicas),
        "replicas": replicas,
    }
    screen = session.screen
    if session.as_json:
        screen.json(facts)
        return
    where = _facts.place_in_words(run.backend, facts["place"])
    screen.line(f"{run.run_id}: {_facts.counts_in_words(facts['states'])}, on {where}")
    screen.lines(_facts.table(_facts.REPLICA_COLUMNS, replicas, session.clock(), screen.width))
    for line in _facts.replica_lines(replicas):
        screen.line(line)


def wait(session: Session, run_id: str) -> int:
    """Wait until every replica of a run has ended, print how, and return the exit code."""
    with session.run(run_id) as run:
        shown = [""]

        def progress(known: Mapping[ReplicaHandle, ReplicaStatus]) -> None:
            states = (
                "unknown" if status.reason == "lost" else status.state.value
                for status in known.values()
            )
            text = _facts.counts_in_words(_facts.counts(states))
            if text != shown[-1]:
                session.screen.say(f"{run_id}: {text}")
                shown.append(text)

        with session.looking("wait", run_id, run.backend):
            results = run.executor.collect(run.handles, progress=progress)
    replicas = [_facts.result_facts(result) for result in results]
    show_replicas(session, run, replicas)
    lost = any(facts["state"] == "succeeded" and facts["error"] for facts in replicas)
    return exit_of_states(facts["state"] for facts in replicas) or (UNKNOWN if lost else 0)
