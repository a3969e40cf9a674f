"""Checks before a launch: connection, rights, room, and what to do if something is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from diloco_protocol import BackendError, Finding, ForbiddenError, InvalidRequestError
from diloco_protocol.backend import Patiently, findings_of

from .._client._cluster import Cluster
from .._client._errors import RESTRICTED, ConflictError, MissingError, MissingRightError
from .._request._names import QUEUE
from .._request._quantities import parse_quantity
from .._state._facts import JobFacts
from .._state._reading import mapping, read_job
from ._launch import met_by

# The rights that launching and watching a run need.
_RIGHTS = (
    ("batch", "jobs", ("create", "get", "list", "patch", "delete")),
    ("", "pods", ("list",)),
    ("", "pods/log", ("get",)),
)
# Optional rights, and what is lost without each of them.
_SPARE_RIGHTS = (
    ("", "serviceaccounts", ("get",), "a service account that does not exist is not noticed"),
    ("", "events", ("list",), "messages do not say why pods do not start"),
)
_KUEUE_RIGHTS = (
    ("kueue.x-k8s.io", "workloads", ("list", "patch")),
    ("kueue.x-k8s.io", "localqueues", ("get",)),
)
_FIX = "apply the Role that comes with diloco-eks (role.yaml) and bind it to your account"


def check_cluster(
    cluster: Cluster,
    manifest: dict[str, Any],
    account: str | None,
    patiently: Patiently,
    *,
    restricted: bool,
) -> list[Finding]:
    """Check everything that can be known before a launch; create nothing.

    Stop at the first check if there is no cluster.

    Args:
        cluster: The cluster.
        manifest: The Job that would be created.
        account: The service account of the Job's pods, if it names one.
        patiently: Makes a call, with retries.
        restricted: Whether ``restricted=True`` was given.
    """
    space = manifest["metadata"]["namespace"]
    queue = manifest["metadata"]["labels"].get(QUEUE)
    rights = findings_of(
        "cluster", lambda: _rights(cluster, space, queued=queue is not None), patiently
    )
    if rights[0].subject == "cluster":
        return rights
    findings = [
        Finding("cluster", True, f"{cluster.client.server} answers and accepts the credentials"),
        *rights,
    ]
    if account is not None:
        check = partial(check_service_account, cluster, space, account)
        findings += _exists("service account", account, check, patiently)
    if queue is not None:
        check = partial(check_queue, cluster, space, queue)
        findings += _exists("queue", f"the queue {queue}", check, patiently)
    helps = (
        ". pod_overlay= breaks that standard, although restricted=True was given"
        if restricted
        else ". Give restricted=True, with which pods comply with that standard"
    )
    findings += _manifest(cluster, manifest, patiently, helps)
    return [*findings, *_quotas(cluster, manifest, patiently)]


def _rights(cluster: Cluster, space: str, *, queued: bool) -> Iterator[Finding]:
    needed = [(*right, "") for right in (*_RIGHTS, *(_KUEUE_RIGHTS if queued else ()))]
    for group, resource, verbs, without in (*needed, *_SPARE_RIGHTS):
        missing = [verb for verb in verbs if not cluster.may(space, verb, resource, group)]
        what = f"{', '.join(missing or verbs)} of {resource} in {space}"
        if not missing:
            yield Finding("rights", True, f"{what} is allowed")
        elif without:
            yield Finding("rights", None, f"{what} is not allowed, so {without}: {_FIX}")
        else:
            yield Finding("rights", False, f"{what} is not allowed: {_FIX}")


def _exists(
    subject: str, name: str, look: Callable[[], bool], patiently: Patiently
) -> list[Finding]:
    """Return whether an object exists, as far as ``look`` can tell; it refuses a missing one."""
    unknown = f"whether {name} exists is not known, since reading it is not allowed: {_FIX}"

    def found() -> list[Finding]:
        return [
            Finding(subject, True, f"{name} exists") if look() else Finding(subject, None, unknown)
        ]

    return findings_of(subject, found, patiently)


def _manifest(
    cluster: Cluster, manifest: dict[str, Any], patiently: Patiently, helps: str
) -> Iterator[Finding]:
    def hinted(text: str) -> str:
        return text + helps if RESTRICTED in text else text

    warned: list[str] = []
    space, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]

    def tried() -> JobFacts | None:
        try:
            cluster.create_job(manifest, dry_run=True, warned=warned)
        except ConflictError as conflict:
            with met_by(conflict):
                return read_job(cluster.read_job(space, name))
        return None

    try:
        job = patiently(tried)
    except BackendError as error:
        yield Finding("manifest", False, str(error))
        return
    if job is not None and job.deleting:
        text = f"the Job {space}/{name} is still being deleted: wait, or choose another run_id"
        yield Finding("manifest", False, text)
        return
    if job is not None:
        text = (
            "there is a Job of that name: the launch that made it finds it again, and any other is "
            "a RunConflictError"
        )
        yield Finding("manifest", None, text)
        return
    yield Finding("manifest", True, "the cluster would accept the Job")
    for warning in dict.fromkeys(warned):
        yield Finding("manifest", None, f"the cluster warns: {hinted(warning)}")
    # The cluster applies policies, limits and classes only to pods: a Job whose pods are refused is
    # accepted, and waits forever.
    try:
        patiently(lambda: cluster.try_pod(manifest))
    except MissingRightError:
        why = "creating pods is not allowed, not even as a dry run"
        yield Finding(
            "pods", None, f"whether its pods would be accepted is not known: {why}. {_FIX}"
        )
    except BackendError as error:
        yield Finding("pods", False, hinted(str(error)))
    else:
        yield Finding("pods", True, "the cluster would accept its pods")


def _quotas(cluster: Cluster, manifest: dict[str, Any], patiently: Patiently) -> Iterator[Finding]:
    space = manifest["metadata"]["namespace"]
    try:
        quotas = patiently(lambda: cluster.list_quotas(space))
    except ForbiddenError:
        yield Finding("quota", None, f"the quotas of {space} cannot be read: {_FIX}")
        return
    except BackendError as error:
        yield Finding("quota", None, str(error))
        return
    needed = needs(manifest)
    # Whether a quota with scopes counts the run's pods is not known.
    scoped = [
        quota
        for quota in quotas
        if any(mapping(quota.get("spec")).get(key) for key in ("scopes", "scopeSelector"))
    ]
    for quota in quotas:
        status = mapping(quota.get("status"))
        hard, used = mapping(status.get("hard")), mapping(status.get("used"))
        for resource in sorted(hard.keys() & needed.keys() if quota not in scoped else ()):
            limit, taken = (
                parse_quantity(str(hard[resource])),
                parse_quantity(str(used.get(resource, "0"))),
            )
            if limit is not None and taken is not None and taken + needed[resource] > limit:
                text = (
                    f"the run needs {_shown(needed[resource])} of {resource}, and the quota "
                    f"{quota['metadata'].get('name')} has {_shown(limit - taken)} of "
                    f"{_shown(limit)} left: the rest of the pods would wait. Raise the quota, or "
                    "launch fewer replicas"
                )
                yield Finding("quota", False, text)
                return
    if scoped:
        text = f"{len(scoped)} quotas of {space} have scopes, and whether they count is not known"
        yield Finding("quota", None, text)
    else:
        yield Finding("quota", True, f"{len(quotas)} quotas of {space} leave room for the run")


def needs(manifest: Mapping[str, Any]) -> dict[str, Fraction]:
    """Return what all pods of a Job take of a quota, by the names that the quota uses."""
    count = manifest["spec"]["parallelism"]
    total: dict[str, Fraction] = {"pods": Fraction(count), "count/jobs.batch": Fraction(1)}
    for container in manifest["spec"]["template"]["spec"]["containers"]:
        resources = container.get("resources") or {}
        for kind in ("requests", "limits"):
            for resource, amount in (resources.get(kind) or {}).items():
                value = (parse_quantity(str(amount)) or Fraction(0)) * count
                names = [f"{kind}.{resource}"]
                if kind == "requests" and resource in {"cpu", "memory", "ephemeral-storage"}:
                    names.append(resource)
                for name in names:
                    total[name] = total.get(name, Fraction(0)) + value
    return total


def _shown(amount: Fraction) -> str:
    for suffix, scale in (("Ti", 1024**4), ("Gi", 1024**3), ("Mi", 1024**2)):
        if amount >= scale:
            return f"{float(amount / scale):g}{suffix}"
    return f"{float(amount):g}"


def check_queue(cluster: Cluster, space: str, queue: str) -> bool:
    """Refuse a queue that does not exist, and return whether it could be checked.

    Without Kueue the Job would start at once, and without its queue it would never start.

    Raises:
        InvalidRequestError: There is no such queue.
    """
    if cluster.kueue_version() is None:
        raise InvalidRequestError(
            f"queue={queue!r}: the cluster has no Kueue, so nothing would hold the run back. "
            "Install Kueue, or leave queue= out"
        )
    missing = (
        f"queue={queue!r}: there is no such LocalQueue in the namespace {space!r}, so the run "
        "would wait for ever: create it, or give another queue="
    )
    return _is_there(lambda: cluster.read_local_queue(space, queue), missing)


def check_service_account(cluster: Cluster, space: str, name: str) -> bool:
    """Refuse a service account that does not exist, and return whether it could be checked.

    The pods of the Job would never be created, and only an event would say so.

    Raises:
        InvalidRequestError: There is no such service account.
    """
    missing = (
        f"there is no service account {name!r} in the namespace {space!r}: create it, or give "
        "another service_account_name"
    )
    return _is_there(lambda: cluster.read_service_account(space, name), missing)


def _is_there(read: Callable[[], object], missing: str) -> bool:
    """Return whether an object could be read; refuse one that is missing."""
    try:
        read()
    except MissingError as error:
        raise InvalidRequestError(f"{missing} ({error})") from error
    except ForbiddenError:
        return False
    return True
