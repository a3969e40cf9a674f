"""Handles of replicas: made for a job, and matched with the job that they belong to."""

from __future__ import annotations

import re

from diloco_protocol import InvalidRequestError, ReplicaHandle
from diloco_protocol.backend import check_metadata, read_whole

from .._request import _names as names
from ._facts import JobFacts, Summary, same_life

_LAUNCH = "launch-"
LAUNCH_ID = 16
"""Hexadecimal digits of the id that distinguishes a launch from others with its fingerprint."""
_UNSEEN = re.compile(
    rf"{_LAUNCH}(?P<print>[0-9a-f]{{16}})(-(?P<id>[0-9a-f]{{{LAUNCH_ID}}})|@(?P<at>[0-9]{{1,15}}))"
)
_LATEST = 253_402_300_799_999  # the end of the year 9999, in milliseconds
_KEYS = frozenset({"job_name", "region", "account", "created"})


def make_handle(
    run_id: str, rank: int, world_size: int, created: int | str, region: str, account: str
) -> ReplicaHandle:
    """Make the handle of a replica.

    Args:
        run_id: Its run.
        rank: Its rank.
        world_size: Number of replicas of the whole run.
        created: When its job was created, in milliseconds. If it is unknown whether the job was
            created, what :func:`unseen` returns.
        region: The region that its job is in.
        account: The account that its job is in.
    """
    metadata = {
        "account": account,
        "created": str(created),
        "job_name": names.job_name(run_id, rank),
        "region": region,
    }
    return ReplicaHandle(rank, "sagemaker", metadata, run_id=run_id, world_size=world_size)


def unseen(fingerprint: str, *, launch_id: str = "", created: int | None = None) -> str:
    """Return the text that a handle has in place of a job's creation time if that is unknown.

    Args:
        fingerprint: The fingerprint of its launch.
        launch_id: The id of its launch, if it can only be a job of that one.
        created: When the job of this name that is in a list was created, in milliseconds.
    """
    tail = f"@{created}" if created is not None else f"-{launch_id}"
    return f"{_LAUNCH}{fingerprint[:16]}{tail}"


def check_handle(handle: ReplicaHandle) -> None:
    """Refuse a handle that was not made by a launch.

    Raises:
        InvalidRequestError: It lacks something that is needed to find its job.
    """
    check_metadata(handle, "a training job", _KEYS)
    name = handle.metadata["job_name"]
    if names.parse_job_name(name) != (handle.run_id, handle.rank):
        raise InvalidRequestError(
            f"this handle is of rank {handle.rank} of run {handle.run_id!r}, and names the "
            f"training job {name!r} of another replica"
        )
    created_of(handle)


def created_of(handle: ReplicaHandle) -> int | None:
    """Return when the job of a handle was created, in milliseconds.

    None if that was not known when the handle was made.

    Raises:
        InvalidRequestError: The handle says something else.
    """
    text = handle.metadata["created"]
    if _UNSEEN.fullmatch(text):
        return None
    return read_whole("this handle's time created, in milliseconds,", text, 0, _LATEST)


def is_of(handle: ReplicaHandle, job: JobFacts) -> bool:
    """Return whether a job is the handle's, and not a later one of the same name."""
    created = created_of(handle)
    if job.run_id != handle.run_id:
        return False
    if (match := _UNSEEN.fullmatch(handle.metadata["created"])) is not None:
        return (
            job.fingerprint.startswith(match["print"])
            and match["id"] in {None, job.launch}
            and (match["at"] is None or same_life(int(match["at"]), job.created))
        )
    return created is not None and same_life(created, job.created)


def may_be_of(handle: ReplicaHandle, summary: Summary) -> bool:
    """Return whether a job in a list can be the handle's; only its details decide that."""
    created = created_of(handle)
    return created is None or same_life(created, summary.created)
