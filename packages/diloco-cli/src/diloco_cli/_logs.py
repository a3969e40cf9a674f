"""The verb ``logs``: the logs of all ranks in one stream."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from diloco_protocol import (
    BackendError,
    BaseExecutor,
    DilocoError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
)
from diloco_protocol.backend import readable, redact_and_cut, redact_text

from ._facts import SUCCEEDED, UNKNOWN, Cell, exit_of_error
from ._session import Session
from ._texts import in_ranges, read_moment, read_ranks
from ._told import is_uri, open_run, read_run

MOST_FOLLOWED = 64
"""Most ranks that are followed at once: each takes a thread and requests to the backend."""
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_blue")
_NOTICED = 1.0  # seconds
_AHEAD = 1000  # lines that have been read and not yet printed
LINE = 16_384
"""Most characters of one line of a log that are printed."""


Line = tuple[int, str | Exception | None]
"""A rank and a line of its log, the error that ended that log, or None for its end."""


def logs(
    session: Session,
    target: str,
    *,
    ranks: Sequence[str] = (),
    follow: bool = False,
    since: str | None = None,
    grep: str | None = None,
) -> int:
    """Print the lines of logs that are wanted, and return the exit code.

    The arguments are the options of the verb as text.
    """
    if is_uri(target):
        if follow or since is not None:
            raise InvalidRequestError(
                "-f and --since are for runs by name: a store keeps only the last lines of a log"
            )
        return _logs_in_store(session, target, ranks, grep)
    moment = None if since is None else read_moment(since, session.clock())
    again = ["-f", "--since", "1m"] if follow else []  # a follower has seen what is older
    again += [word for text in ranks for word in ("--rank", text)]
    again += [] if grep is None else ["--grep", redact_text(grep)]
    with session.run(target) as run:
        wanted = read_ranks(ranks, (handle.rank for handle in run.handles))
        handles = [handle for handle in run.handles if handle.rank in set(wanted)]
        if follow and len(handles) > MOST_FOLLOWED:
            raise InvalidRequestError(
                f"-f follows at most {MOST_FOLLOWED} ranks at once, and these are {len(handles)}: "
                f"choose some, such as --rank 0-{MOST_FOLLOWED - 1}"
            )
        read = partial(_read, run.executor, follow=follow, since=moment, regex=grep)
        lines = _merged(read, handles) if follow else chain.from_iterable(map(read, handles))
        code, room = SUCCEEDED, len(str(wanted[-1]))
        with session.looking("logs", target, run.backend, again):
            for rank, text in lines:
                if isinstance(text, BackendError) and not isinstance(text, InvalidRequestError):
                    session.screen.say(f"rank {rank}: {text}")
                    code = max(code, exit_of_error(text))
                elif isinstance(text, Exception):
                    raise text
                elif text is not None:
                    _print(session, rank, text, room)
    return code


def _print(session: Session, rank: int, text: str, room: int) -> None:
    text = redact_and_cut(text, LINE)
    if session.as_json:  # JSON escapes control characters itself
        session.screen.line(json.dumps({"rank": rank, "line": text}))
    else:
        prefix = Cell(f"{rank:>{room}} | ", _STYLES[rank % len(_STYLES)])
        session.screen.line(prefix, readable(text))


def _read(executor: BaseExecutor, handle: ReplicaHandle, **query: Any) -> Iterator[Line]:
    """Yield the lines of one log, and at the end its error or None.

    Where the backend has none, they are the last lines that the executor's journal keeps, if any.
    """
    begun, end = False, None
    try:
        for line in executor.log_iter(handle, **query):
            begun = True
            yield handle.rank, line
    except DilocoError as error:
        is_gone = isinstance(end := error, ReplicaNotFoundError) and not begun
        kept = executor.kept_log(handle) if is_gone else None
        if kept is not None:
            end = ReplicaNotFoundError(f"{error}. The lines are the last ones, from the journal")
        for line in _chosen(kept, query["regex"]):
            yield handle.rank, line
    yield handle.rank, end


def _logs_in_store(session: Session, uri: str, ranks: Sequence[str], grep: str | None) -> int:
    """Print the ends of logs that the journal in a store keeps, and return the exit code."""
    session.ask_no_backend()
    telemetry, recorded = read_run(open_run(uri), history=False)
    wanted = read_ranks(ranks, telemetry.live.keys() | recorded.handles.keys())
    kept = {rank: recorded.log(recorded.handles.get(rank)) for rank in wanted}
    for rank, log in kept.items():
        for line in _chosen(log, grep):
            _print(session, rank, line, len(str(wanted[-1])))
    none = [rank for rank, log in kept.items() if log is None]
    if len(none) < len(wanted):
        session.screen.say("these are the last lines, as the journal in the store keeps them")
    if none:
        session.screen.say(f"the journal in the store keeps no log of these: {in_ranges(none)}")
    return UNKNOWN if none else SUCCEEDED


def _chosen(log: str | None, grep: str | None) -> list[str]:
    """Return the lines of a log that are wanted."""
    try:
        wanted = re.compile(grep or "")
    except re.error as error:
        raise InvalidRequestError(f"--grep is not a regular expression: {error}") from None
    return [line for line in (log or "").split("\n")[:-1] if wanted.search(line)]


def _merged(read: partial[Iterator[Line]], handles: Sequence[ReplicaHandle]) -> Iterator[Line]:
    """Yield the lines of several logs as they come, until all of them have ended.

    Each log has a thread. The threads end with this process.
    """
    lines: queue.Queue[Line] = queue.Queue(_AHEAD)

    def follow(handle: ReplicaHandle) -> None:
        try:
            for line in read(handle):
                lines.put(line)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            lines.put((handle.rank, error))

    for handle in handles:
        threading.Thread(target=follow, args=(handle,), daemon=True).start()
    ended = 0
    while ended < len(handles):
        try:
            line = lines.get(timeout=_NOTICED)
        except queue.Empty:  # a Ctrl-C just before the wait is noticed only after it
            continue
        ended += not isinstance(line[1], str)
        yield line
