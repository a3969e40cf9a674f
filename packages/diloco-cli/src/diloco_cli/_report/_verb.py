"""The verb ``report``: reads what is known of a run, and writes the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_protocol import (
    DilocoError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
)
from diloco_protocol.backend import shown
from diloco_protocol.telemetry import Told

from ..__about__ import __version__
from .._backends import Run
from .._exits import SUCCEEDED
from .._facts import place_of, replica_facts
from .._journal import Recorded
from .._session import Session
from .._store import is_uri
from .._texts import clean
from .._told import read_run
from ._page import page
from ._prices import DEFAULT, MOST_BYTES, Prices, read_prices
from ._summary import summarise

_LINES, _MOST_LOGS = 20, 16
_BY_JOURNAL = (
    "How those ended of which no backend has a record is what the journal in the store says."
)
_NOTHING = Told(live={}, history={}, skipped=0, of_another_version=0, left_out=0)


def report(
    session: Session,
    run: str,
    *,
    store: str | None,
    file: str | None,
    force: bool,
    prices: str | None,
) -> int:
    """Make the report of a run, and return the exit code.

    Args:
        session: The backends, of which only that of a run by name is asked.
        run: Its name, or the URI of its store.
        store: Where the replicas of a run by name meet; None if only the backend is asked.
        file: Where the page goes; None for no page.
        force: Whether a file that is there is replaced.
        prices: The file of a price table; None for the one that comes with the command.

    Raises:
        InvalidRequestError: The file cannot be written, the prices are not allowed, or nothing was
            asked for.
    """
    if file is None and not session.as_json:
        raise InvalidRequestError("say where the page goes (-o FILE), or ask for --json")
    if file is not None:
        _check_file(Path(file), force=force)
    table = _read_prices(DEFAULT if prices is None else Path(prices))
    run_id = "" if is_uri(run) else run
    if not run_id:
        session.ask_no_backend()
        if store is not None:
            raise InvalidRequestError(f"--store is for runs by name: {run} is that of a store")
    uri = store if run_id else run
    told, recorded = (_NOTHING, None) if uri is None else read_run(uri)
    backend = _ask_backend(session, run_id, recorded) if run_id else None
    if backend is None and recorded is not None and recorded.ends:
        backend = _recorded_facts(recorded)
        run_id = run_id or ("" if told.live else next(iter(recorded.ends)).run_id)
    named = sorted({live.run for live in told.live.values()})
    if run_id and named and run_id not in named:
        raise InvalidRequestError(
            f"--store {uri} is not that of run {run_id}: its replicas tell of {shown(named)}"
        )
    summary = summarise(
        told, table, uri=uri, now=time.time(), made_by=__version__, run_id=run_id, backend=backend
    )
    if recorded is not None and recorded.ends:
        summary = replace(summary, missing=(*summary.missing, _BY_JOURNAL))
    if file is not None:
        _write(Path(file), page(summary), force=force)
    if session.as_json:
        session.screen.json(summary.to_json())
    else:
        session.screen.line(clean(str(file)))
    return SUCCEEDED


def _check_file(file: Path, *, force: bool) -> None:
    """Refuse a file that cannot be written, before anything is read for it."""
    if not file.parent.is_dir():
        raise InvalidRequestError(f"-o {file}: there is no folder {file.parent}: make it first")
    if file.is_dir():
        raise InvalidRequestError(f"-o {file} is a folder: name a file in it")
    if file.exists() and not force:
        raise InvalidRequestError(f"-o {file} is there already: --force replaces it")


def _write(file: Path, text: str, *, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise InvalidRequestError(f"-o {file} cannot be written: {error.strerror}") from None


def _read_prices(path: Path) -> Prices:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"--prices {path} cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise InvalidRequestError(f"--prices {path} is larger than {MOST_BYTES} bytes")
    return read_prices(data)


def _ask_backend(session: Session, run_id: str, recorded: Recorded | None) -> dict[str, Any] | None:
    """Return what a backend says about a run; None if only the journal in the store has it.

    Raises:
        ReplicaNotFoundError: There is no run, here or in the journal.
    """
    try:
        with session.run(run_id) as run:
            return _backend_facts(run, recorded)
    except ReplicaNotFoundError:
        if recorded is None or not recorded.ends:
            raise
    return None


def _backend_facts(run: Run, recorded: Recorded | None) -> dict[str, Any]:
    """Return what a backend says about a run, with the ends of the logs of what failed."""
    seen = run.executor.describe_run(run.handles)
    ends = {} if recorded is None else recorded.ends

    def log(handle: ReplicaHandle) -> str:
        try:
            return run.executor.stream_logs(handle, n_lines=_LINES)
        except DilocoError as error:
            kept = None if recorded is None else recorded.log(handle)
            return kept or f"(its log cannot be read: {error})"

    return _facts_of(run.backend, run.handles, {**ends, **seen}, log)


def _recorded_facts(recorded: Recorded) -> dict[str, Any]:
    """Return what the journal in the store says, as if a backend said it."""
    handles = list(recorded.ends)
    name = clean(handles[0].backend_name)
    return _facts_of(name, handles, recorded.ends, lambda handle: recorded.log(handle) or "")


def _facts_of(
    backend: str,
    handles: Sequence[ReplicaHandle],
    seen: Mapping[ReplicaHandle, ReplicaStatus],
    log: Callable[[ReplicaHandle], str],
) -> dict[str, Any]:
    """Return the facts about a run, with the last lines of those that failed."""
    replicas = {
        handle: {**replica_facts(handle, seen.get(handle)), "last_lines": []} for handle in handles
    }
    failed = [handle for handle, facts in replicas.items() if facts["state"] == "failed"]
    for handle in failed[:_MOST_LOGS]:
        replicas[handle]["last_lines"] = [
            clean(line) for line in log(handle).splitlines()[-_LINES:]
        ]
    return {
        "name": backend,
        "place": place_of(handles),
        "world_size": handles[0].world_size,
        "replicas": list(replicas.values()),
    }
