"""The verb ``report``: reads what is known of a run, and writes the page."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, BinaryIO

from diloco_protocol import (
    DilocoError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
)
from diloco_protocol.backend import shown
from diloco_protocol.telemetry import Told

from ..__about__ import __version__
from .._backends import Run
from .._facts import SUCCEEDED, place_of, replica_facts
from .._session import Session
from .._store import is_uri
from .._texts import clean
from .._told import Recorded, read_run
from ._page import page
from ._summary import DEFAULT, MOST_BYTES, read_prices, summarise

_LINES, _MOST_LOGS = 20, 16
_BY_JOURNAL = (
    "How those ended of which no backend has a record is what the journal in the store says."
)
_NOTHING = Told(live={}, history={}, skipped=0, of_another_version=0, left_out=0)


def report(
    session: Session,
    target: str,
    *,
    store: str | None,
    file: str | None,
    force: bool,
    prices: BinaryIO | None,
) -> int:
    """Make the report of a run, and return the exit code.

    Args:
        session: The backends, of which only that of a run by name is asked.
        target: Its name, or the URI of its store.
        store: Where the replicas of a run by name meet; None if only the backend is asked.
        file: Where the page goes; None for no page.
        force: Whether a file that is there is replaced.
        prices: A price table; None for the one that comes with the command.

    Raises:
        InvalidRequestError: The file cannot be written, the prices are not allowed, or nothing was
            asked for.
    """
    if file is None and not session.as_json:
        raise InvalidRequestError("say where the page goes (-o FILE), or ask for --json")
    if file is None and force:
        raise InvalidRequestError("--force replaces the file of -o, and there is no -o")
    if file is not None and not Path(file).parent.is_dir():
        raise InvalidRequestError(f"-o {file}: there is no such folder: make it first")
    if file is not None and Path(file).exists() and not force:
        raise InvalidRequestError(f"-o {file} is there already: --force replaces it")
    table = read_prices(DEFAULT.read_bytes() if prices is None else prices.read(MOST_BYTES + 1))
    run_id = "" if is_uri(target) else target
    if not run_id:
        session.ask_no_backend()
        if store is not None:
            raise InvalidRequestError(f"--store is for runs by name: {target} is that of a store")
    uri = store if run_id else target
    told, recorded = (_NOTHING, None) if uri is None else read_run(uri)
    backend = _backend_facts(session, run_id, recorded)
    named = sorted({live.run for live in told.live.values()})
    if run_id and named and run_id not in named:
        raise InvalidRequestError(
            f"--store {uri} is not that of run {run_id}: its replicas tell of {shown(named)}"
        )
    if recorded is not None and recorded.ends and not named:
        run_id = run_id or next(iter(recorded.ends)).run_id
    summary = summarise(
        told, table, uri=uri, now=time.time(), made_by=__version__, run_id=run_id, backend=backend
    )
    if recorded is not None and recorded.ends:
        summary["missing"].append(_BY_JOURNAL)
    if file is not None:
        _write(Path(file), page(summary), force=force)
    for note in summary["missing"] if uri is None else ():
        session.screen.say(note)
    if session.as_json:
        session.screen.json(summary)
    elif file is not None:
        session.screen.line(clean(file))
    return SUCCEEDED


def _write(file: Path, text: str, *, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise InvalidRequestError(f"-o {file} cannot be written: {error.strerror}") from None


def _backend_facts(
    session: Session, run_id: str, recorded: Recorded | None
) -> dict[str, Any] | None:
    """Return what a backend says about a run, or else the journal in its store; None if neither is.

    Raises:
        ReplicaNotFoundError: A run of that name is neither here nor in the journal.
    """
    ends = {} if recorded is None else recorded.ends
    with contextlib.ExitStack() as opened:
        try:
            run = opened.enter_context(session.run(run_id)) if run_id else None
        except ReplicaNotFoundError:
            if not ends:
                raise
            run = None
        if run is None and not ends:
            return None
        handles = run.handles if run else list(ends)
        seen = {**ends, **(run.executor.describe_run(handles) if run else {})}
        replicas = [
            {**replica_facts(handle, seen.get(handle)), "last_lines": []} for handle in handles
        ]
        pairs = zip(handles, replicas, strict=True)
        for handle, facts in [each for each in pairs if each[1]["state"] == "failed"][:_MOST_LOGS]:
            lines = _log(run, recorded, handle).splitlines()[-_LINES:]
            facts["last_lines"] = list(map(clean, lines))
        return {
            "name": run.backend if run else clean(handles[0].backend_name),
            "place": place_of(handles),
            "world_size": handles[0].world_size,
            "replicas": replicas,
        }


def _log(run: Run | None, recorded: Recorded | None, handle: ReplicaHandle) -> str:
    problem = ""
    if run is not None:
        try:
            return run.executor.stream_logs(handle, n_lines=_LINES)
        except DilocoError as error:
            problem = f"(its log cannot be read: {error})"
    return (recorded and recorded.log(handle)) or problem
