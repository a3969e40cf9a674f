"""Creating a run's Job exactly once, even if the answer is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diloco_protocol import BackendError, LaunchError, RunConflictError, UnavailableError
from diloco_protocol.backend import Patiently

from .._client._cluster import Cluster
from .._client._errors import ConflictError, MissingError, UnreachedError, warn
from .._state._facts import JobFacts
from .._state._handles import handles_of
from .._state._reading import read_job


def create(cluster: Cluster, manifest: dict[str, Any], patiently: Patiently) -> JobFacts:
    """Create the Job of a run, or find the one that an earlier try created.

    A lost answer does no harm: the next try finds the Job, which has the launch's fingerprint.

    Raises:
        RunConflictError: A Job of this name belongs to another launch, or is being deleted.
        LaunchError: It is not known whether the Job was created.
        BackendError: The Job was not created.
    """
    unsure = False

    def once() -> JobFacts:
        nonlocal unsure
        try:
            facts = read_job(create_job(cluster, manifest))
        except ConflictError as conflict:
            with met_by(conflict):
                return known(cluster, manifest)
        except UnreachedError:
            raise
        except UnavailableError:
            unsure = True
            raise
        if not _is_same(facts, manifest):
            unsure = True
            raise UnavailableError(
                "the cluster's answer is another Job than the one that was to be created, "
                f"{facts.name}"
            )
        return facts

    try:
        return patiently(once)
    except BackendError as error:
        # A refusal says nothing of an earlier try: its Job may fill the quota that refuses another.
        if not unsure or isinstance(error, RunConflictError):
            raise
        try:
            return known(cluster, manifest)
        except MissingError:
            raise error from None
        except BackendError as second:
            space, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
            raise LaunchError(
                f"{error}. Whether the Job {name} was created is not known, since {second}: launch "
                f"again with run_id={name!r}, or attach({name!r}), once the cluster answers",
                handles_of(read_job(manifest), space, cluster.client.server),
            ) from error


def create_job(cluster: Cluster, manifest: dict[str, Any]) -> dict[str, Any]:
    """Create a Job, and log the cluster's warnings."""
    warned: list[str] = []
    job = cluster.create_job(manifest, warned=warned)
    for text in dict.fromkeys(warned):
        warn(f"the cluster warns of the Job {manifest['metadata']['name']}: {text}")
    return job


@contextlib.contextmanager
def met_by(conflict: ConflictError) -> Iterator[None]:
    """Treat a conflict as temporary if there is no Job of that name.

    Two launches may have collided in a quota.

    Raises:
        UnavailableError: Raised in place of MissingError.
    """
    try:
        yield
    except MissingError:
        raise UnavailableError(str(conflict)) from conflict


def known(cluster: Cluster, manifest: dict[str, Any]) -> JobFacts:
    """Return the Job that has the run's name, if this launch created it.

    Raises:
        MissingError: There is no such Job.
        RunConflictError: The Job belongs to another launch, or is being deleted.
    """
    space, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    facts = read_job(cluster.read_job(space, name))
    if facts.deleting:
        raise RunConflictError(
            f"the Job {space}/{name} is still being deleted: wait, or choose another run_id"
        )
    if not _is_same(facts, manifest):
        raise RunConflictError(
            f"there is a Job {space}/{name} already, which is of another launch or program, or was "
            f"changed since: choose another run_id; attach({name!r}) finds a run again"
        )
    return facts


def _is_same(facts: JobFacts, manifest: dict[str, Any]) -> bool:
    """Return whether a Job has the run_id, fingerprint and ranks that its launch gave it."""
    manifest_facts = read_job(manifest)
    return all(
        getattr(facts, name) == getattr(manifest_facts, name)
        for name in ("run_id", "fingerprint", "completions", "first_rank", "world_size")
    )


def withdraw(cluster: Cluster, manifest: dict[str, Any], patiently: Patiently) -> None:
    """Delete what an interrupted launch may have created, as far as that is possible."""

    def once() -> None:
        with contextlib.suppress(MissingError):
            facts = known(cluster, manifest)
            cluster.delete_job(manifest["metadata"]["namespace"], facts.name, facts.uid)

    with contextlib.suppress(BackendError):
        patiently(once)
