"""The records of a journal: their names, and JSON that is checked when it is read.

Pure functions. Anyone may have written what they read.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import __about__
from ._checks import shown
from ._errors import DilocoError, InvalidRequestError
from ._fields import check_version, status_from_data, status_to_data
from ._handle import ReplicaHandle
from ._json import OUTCOME_BYTES, RECORD_BYTES, check_json, check_size, dumps, loads
from ._redact import redact_json
from ._request import is_run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ._request import RunRequest
    from ._types import ReplicaStatus

KINDS = LAUNCHED, ENDED, LOGGED = ".launched.json", ".ended.json", ".log.json"
"""The kinds of records: how their names end."""
LOG_BYTES = 1024 * 1024
"""The most bytes of a log that a journal keeps: the last ones."""
OPTIONS_BYTES = 64 * 1024
"""The most bytes of the options of a launch; where there are more, the longest are left out."""
_LONGEST_NAME = 200  # file systems take 255 bytes
_VERSION = 3
_ODD = re.compile("[^a-z0-9_-]")  # not in the name of every file
_LARGEST_NUMBER = 999_999_999
_OPTIONS = (
    "entrypoint", "cohort", "world_size", "rendezvous_uri", "gpu", "timeout", "cpu", "memory",
    "spot", "max_restarts", "labels",
)  # fmt: skip


class DamagedRecordError(InvalidRequestError):
    """Raised when a record of a journal cannot be read.

    It concerns one replica or the launches of one run, and no others.
    """


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch as a journal has it.

    Attributes:
        handles: Its replicas, in rank order.
        options: What it asked for, without secrets; empty if that is not known.
    """

    handles: tuple[ReplicaHandle, ...]
    options: Mapping[str, Any]


def folder_of(run_id: str) -> str:
    """Return the folder with the records of a run.

    Raises:
        InvalidRequestError: No run can have such a name.
    """
    if not isinstance(run_id, str) or not is_run_id(run_id):
        raise InvalidRequestError(f"a journal has no run of such a name as {shown(run_id)}")
    return f"{run_id}/"


def key_of(handle: ReplicaHandle, kind: str) -> str:
    """Return the key of the record that a replica has of a kind, such as :data:`ENDED`."""
    # Runs with the same run_id elsewhere have records of their own, so the handle is in the name.
    checksum = zlib.crc32(handle.to_json().encode())
    backend = _ODD.sub("_", handle.backend_name)[:_LONGEST_NAME]
    return f"{folder_of(handle.run_id)}{backend}-{handle.rank:05}.{checksum:08x}{kind}"


def most_of(key: str) -> int:
    """Return how many bytes a record may have."""
    return OUTCOME_BYTES if key.endswith(ENDED) else RECORD_BYTES


def launches_in(names: Iterable[str]) -> list[str]:
    """Return the names of records of launches, the latest at the end."""
    return sorted(
        (name for name in names if name.endswith(LAUNCHED)), key=lambda name: (_number(name), name)
    )


def next_name(earlier: Iterable[str], digest: str) -> str:
    """Return the name of the record of a launch that is later than those."""
    number = min(_LARGEST_NUMBER, 1 + max(map(_number, earlier), default=0))
    return f"{number:06}.{digest}{LAUNCHED}"


def _number(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= 9 else 0


def current(
    launches: Iterable[Launch], wanted: Callable[[ReplicaHandle], bool] | None
) -> list[ReplicaHandle]:
    """Return the handles that count, in rank order; the latest launch comes first."""
    result: list[ReplicaHandle] = []
    taken: set[tuple[str, int]] = set()
    for launch in launches:
        handles = list(filter(wanted, launch.handles))
        places = set(map(_place, handles))
        # A launch no longer counts when a later launch has taken one of its ranks.
        if taken.isdisjoint(places):
            result += handles
        taken |= places
    return sorted(result, key=_rank)


def _rank(handle: ReplicaHandle) -> int:
    return handle.rank


def _place(handle: ReplicaHandle) -> tuple[str, int]:
    return handle.backend_name, handle.rank


def options_of_launch(request: RunRequest) -> dict[str, Any]:
    """Return what a record says of a launch: no secrets, and no variables of the environment."""
    options = redact_json({name: getattr(request, name) for name in _OPTIONS})
    options |= {"arguments": redact_json(request.kwargs), "protocol": __about__.__version__}
    while len(dumps(options)) > OPTIONS_BYTES:
        del options[max(options, key=lambda name: len(dumps(options[name])))]
    return dict(options)


def launch_record(
    handles: Iterable[ReplicaHandle], options: Mapping[str, Any] | None
) -> tuple[Launch, str, dict[str, Any]]:
    """Return a launch, a digest of its handles, and its record.

    Raises:
        InvalidRequestError: It has a rank twice, or the options are not JSON.
    """
    import hashlib  # slow to import

    check_json(options or {}, "options")
    launch = Launch(tuple(sorted(handles, key=_rank)), options or {})
    if len(set(map(_place, launch.handles))) != len(launch.handles):
        raise InvalidRequestError("a launch cannot be recorded that has a rank twice")
    record: dict[str, Any] = {"handles": [handle.to_dict() for handle in launch.handles]}
    digest = hashlib.sha256(dumps(record).encode()).hexdigest()[:16]
    return launch, digest, record | ({"options": dict(options)} if options else {})


def end_record(handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> dict[str, Any]:
    """Return the record of an end.

    Raises:
        InvalidRequestError: The state is not an end, or the result is not JSON.
    """
    if not status.state.terminal:
        raise InvalidRequestError(
            f"only the end of a replica can be recorded, and the state {str(status.state)!r} "
            "is not an end"
        )
    check_json(result, "result")
    return {"handle": handle.to_dict(), "status": status_to_data(status), "result": result}


def log_record(handle: ReplicaHandle, text: str) -> dict[str, Any]:
    """Return the record of the end of a log: its last lines, of at most :data:`LOG_BYTES`."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > LOG_BYTES:
        data = data[-LOG_BYTES:].partition(b"\n")[2] or data[-LOG_BYTES:]
    return {"handle": handle.to_dict(), "log": data.decode("utf-8", "ignore")}


def to_bytes(record: Mapping[str, Any], what: str, most: int) -> bytes:
    """Return a record as it is written.

    Raises:
        InvalidRequestError: It has more bytes than a reader accepts.
    """
    data = dumps({"version": _VERSION, **record}).encode()
    check_size(what, len(data), most)
    return data


def read_launch(data: bytes, what: str) -> Launch:
    """Return the launch that a record holds.

    Raises:
        DamagedRecordError: It is not such a record. So do the other functions that read.
        SpecVersionError: It is of another version.
    """
    record = _read(data, what, {"handles"}, {"options"}, RECORD_BYTES)
    with _reading(what):
        if type(record["handles"]) is not list or type(record.get("options", {})) is not dict:
            raise InvalidRequestError("handles is not a list, or options is not an object")
        handles = tuple(map(ReplicaHandle.from_dict, record["handles"]))
        if len(set(map(_place, handles))) != len(handles):
            raise InvalidRequestError("it has a rank twice")
        check_json(options := record.get("options", {}), "options")
        return Launch(handles, options)


def read_end(handle: ReplicaHandle, data: bytes, what: str) -> tuple[ReplicaStatus, Any] | None:
    """Return the end of a replica that a record holds; None if it is that of another."""
    record = _read(data, what, {"handle", "status", "result"}, set(), OUTCOME_BYTES)
    with _reading(what):
        owner = ReplicaHandle.from_dict(record["handle"])
        status = status_from_data(record["status"])
        if owner != handle:
            return None  # the end of another run, which got the same run_id elsewhere
        if not status.state.terminal:
            raise InvalidRequestError(f"the state {status.state.value!r} is not an end")
        check_json(record["result"], "result")
        return status, record["result"]


def read_log(handle: ReplicaHandle, data: bytes, what: str) -> str | None:
    """Return the log of a replica that a record holds; None if it is that of another."""
    record = _read(data, what, {"handle", "log"}, set(), RECORD_BYTES)
    with _reading(what):
        if type(text := record["log"]) is not str:
            raise InvalidRequestError("log is not text")
        return text if ReplicaHandle.from_dict(record["handle"]) == handle else None


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Report what is wrong with the content of a record as damage of it."""
    try:
        yield
    except (DilocoError, UnicodeDecodeError) as error:
        raise DamagedRecordError(
            f"the journal's record {what} is damaged: {error}. Without the file, the backend is "
            "asked again"
        ) from None


def _read(data: bytes, what: str, names: set[str], more: set[str], most: int) -> dict[str, Any]:
    """Return a record of this version, with those fields, and perhaps some more."""
    with _reading(what):
        check_size("it", len(data), most)
        parsed = loads(data.decode(), "it")
    record = check_version(what, parsed, _VERSION)
    with _reading(what):
        if record.keys() - more != names | {"version"}:
            raise InvalidRequestError(
                f"it has the fields {shown(sorted(record))} instead of {sorted(names)}"
            )
    return record
