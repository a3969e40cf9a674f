"""Handles of replicas, made from their calls."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from diloco_protocol import InvalidRequestError, ReplicaHandle
from diloco_protocol.backend import check_metadata, shown

from ._record import call_of, stray

_KEYS = frozenset({"app", "function", "environment", "launch", "launched_at", "function_call_id"})


def make_handle(launch: Mapping[str, Any], rank: int, call_id: str, run_id: str) -> ReplicaHandle:
    """Make the handle of a replica; in every process the same, as all of it is in the record."""
    metadata = {
        "app": launch["app"],
        "function": launch["function"],
        "environment": launch["environment"],
        "launch": launch["id"],
        "launched_at": datetime.fromtimestamp(launch["at"], UTC).isoformat(timespec="milliseconds"),
        "function_call_id": call_id,
    }
    return ReplicaHandle(rank, "modal", metadata, run_id=run_id, world_size=launch["world_size"])


def check_handle(handle: ReplicaHandle, environment: str | None) -> None:
    """Refuse a handle that was not made by a launch, or is of another environment.

    Args:
        handle: The handle to check.
        environment: Name of the executor's environment; None if it is not known yet.

    Raises:
        InvalidRequestError: Says what is missing, or which environment the handle belongs to.
    """
    check_metadata(handle, "a call", _KEYS)
    theirs = handle.metadata["environment"]
    if environment is not None and theirs != environment:
        raise InvalidRequestError(
            f"this handle is of Modal's environment {shown(theirs)}, and this executor is for "
            f"{environment!r}: make one with environment_name={shown(theirs)}"
        )


def launched_at(handle: ReplicaHandle) -> float:
    """Return the time of a handle's launch, in Unix seconds; 0 if the handle does not say."""
    try:
        return datetime.fromisoformat(handle.metadata["launched_at"]).timestamp()
    except (OverflowError, ValueError):
        return 0.0


def link(call_id: str) -> str:
    """Return the address of Modal's page of a call."""
    return f"https://modal.com/id/{call_id}"


def is_of(handle: ReplicaHandle, launch: Mapping[str, Any], entries: Mapping[str, str]) -> bool:
    """Return whether a record is the handle's, and not that of a later launch of the same name.

    Raises:
        DamagedRecordError: The entry of its call is damaged, or the launch leaves its rank out.
    """
    call = call_of(entries, handle.rank)
    if not call:
        return False
    if handle.rank not in launch["ranks"]:
        raise stray(entries, handle.rank)
    return call == handle.metadata["function_call_id"] and is_of_launch(handle, launch)


def not_its_own(handle: ReplicaHandle) -> str:
    """Explain that a record does not name the call of a handle, or names it for another launch."""
    return (
        f"the record of the run {handle.run_id!r} on Modal does not name the call of this handle "
        f"as that of rank {handle.rank} of its launch; attach({handle.run_id!r}) gives its handles"
    )


def is_of_launch(handle: ReplicaHandle, launch: Mapping[str, Any]) -> bool:
    """Return whether a handle and a record agree about the launch, whatever the call is."""
    call = handle.metadata["function_call_id"]
    true = make_handle(launch, handle.rank, call, handle.run_id)
    return handle.world_size == true.world_size and all(
        handle.metadata[key] == value for key, value in true.metadata.items()
    )
