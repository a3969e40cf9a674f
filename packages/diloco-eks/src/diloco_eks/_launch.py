"""Creating a run's Job exactly once, even if the answer is lost."""

from __future__ import annotations

import contextlib
from typing import Any

from diloco_protocol import (
    BackendError,
    Backoff,
    ForbiddenError,
    InvalidRequestError,
    RunConflictError,
    UnavailableError,
    retry,
)

from . import _names as names
from ._cluster import Cluster
from ._errors import ConflictError, MissingError, UnreachedError
from ._facts import JobFacts, read_job


class UnknownLaunchError(BackendError):
    """Raised when it could not be found out whether the Job was created."""


def create(
    cluster: Cluster, manifest: dict[str, Any], backoff: Backoff, patience: float
) -> JobFacts:
    """Create the Job of a run, or find the one that an earlier try created.

    An answer that was lost does no harm: the next try meets the Job, which carries the launch's fingerprint.

    Raises:
        RunConflictError: A Job of this name belongs to another launch, or is being deleted.
        UnknownLaunchError: Whether it was created is unknown.
        BackendError: It was not created.
    """
    unsure = False

    def once() -> JobFacts:
        nonlocal unsure
        try:
            return read_job(cluster.create_job(manifest))
        except ConflictError:
            return known(cluster, manifest)
        except UnreachedError:
            raise
        except UnavailableError:
            unsure = True
            raise

    try:
        return retry(once, backoff, timeout=patience)
    except BackendError as error:
        if not (unsure and error.retryable):
            raise
        try:
            return known(cluster, manifest)
        except MissingError:
            raise error from None
        except BackendError as second:
            name = manifest["metadata"]["name"]
            raise UnknownLaunchError(
                f"{error}. Whether the Job {name} was created is not known, since {second}: launch again with "
                f"run_id={name!r}, or attach({name!r}), once the cluster answers"
            ) from error


def known(cluster: Cluster, manifest: dict[str, Any]) -> JobFacts:
    """The Job that has the run's name, if this launch created it.

    Raises:
        MissingError: There is no such Job.
        RunConflictError: It is another launch's, or is being deleted.
    """
    space, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    facts = read_job(cluster.read_job(space, name))
    if facts.deleting:
        raise RunConflictError(
            f"the Job {space}/{name} is still being deleted: wait, or choose another run_id"
        )
    if facts.fingerprint != manifest["metadata"]["annotations"][names.FINGERPRINT]:
        whose = "of another launch" if facts.run_id else "that was not launched by diloco"
        raise RunConflictError(
            f"there is a Job {space}/{name} already, {whose}: choose another run_id; attach({name!r}) finds a run again"
        )
    return facts


def withdraw(cluster: Cluster, manifest: dict[str, Any], backoff: Backoff, patience: float) -> bool:
    """Delete what an interrupted launch may have created; returns whether nothing is left of it."""

    def once() -> None:
        with contextlib.suppress(MissingError):
            facts = known(cluster, manifest)
            cluster.delete_job(manifest["metadata"]["namespace"], facts.name, facts.uid)

    try:
        retry(once, backoff, timeout=patience)
    except BackendError:
        return False
    return True


def check_service_account(cluster: Cluster, space: str, name: str) -> bool:
    """Refuse a service account that does not exist: its pods would never be created, and only an event would say so.

    Returns whether that could be found out.

    Raises:
        InvalidRequestError: There is no such service account.
    """
    try:
        cluster.read_service_account(space, name)
    except MissingError as error:
        raise InvalidRequestError(
            f"there is no service account {name!r} in the namespace {space!r}: create it, or give another "
            f"service_account_name ({error})"
        ) from error
    except ForbiddenError:
        return False
    return True
