"""The calls to the cluster, one method each.

They use keyword arguments only, because the newest client refuses positional ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from diloco_protocol import InvalidRequestError, UnavailableError

from .._request._names import CONTAINER, CONTROLLER_UID, INDEX
from .._state._facts import PodFacts
from .._state._reading import mapping, mappings, read_pod, run_of
from ._answers import missing_only, own_answer
from ._client import Apis, Client
from ._errors import ExpiredError, MissingError

T = TypeVar("T")
Json = dict[str, Any]
PAGE = 250
_OBJECTS, _PAGES = 100_000, 1000  # of one list, at most
_KEPT = 1 << 27  # characters that are kept of a list
_KUEUE = "kueue.x-k8s.io"
_KUEUE_VERSIONS = ("v1beta2", "v1beta1")  # the versions that this code knows, newest first


class Cluster:
    """Jobs, pods and logs of a cluster, as JSON. Thread-safe.

    Every method raises what :meth:`Client.call` does.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._kueue: str | None = None

    def create_job(
        self, manifest: Json, *, dry_run: bool = False, warned: list[str] | None = None
    ) -> Json:
        """Create a Job, or only have it checked.

        A field that the cluster does not know is refused, not dropped.

        Args:
            manifest: The Job.
            dry_run: Whether to create nothing.
            warned: The cluster's warnings are appended to it.
        """
        space, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        only: Json = {"dry_run": "All"} if dry_run else {}
        try:
            return self._one(
                "create", "Job", space, name, "batch.create_namespaced_job", warned=warned,
                within=space, body=manifest, field_validation="Strict", **only,
            )  # fmt: skip
        except MissingError as error:
            raise InvalidRequestError(
                f"there is no namespace {space!r} on the cluster: create it, or give another "
                f"namespace= ({error})"
            ) from error

    def try_pod(self, manifest: Json) -> None:
        """Have the cluster check a pod of a Job; create nothing.

        The cluster does not check the pods when it checks the Job itself.
        """
        space, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        template = manifest["spec"]["template"]
        metadata = {**template["metadata"], "generateName": f"{name}-0-"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self._json(
            f"create a pod of Job {space}/{name} (a dry run)", ("Pod", "", space),
            "core.create_namespaced_pod", within=space, body=body, field_validation="Strict",
            dry_run="All",
        )  # fmt: skip

    def list_events(self, space: str, uid: str) -> list[Json]:
        """Return one page of the events of an object, since there may be any number of them."""
        page = self._json(
            f"list events in {space}", ("EventList", "", space), "core.list_namespaced_event",
            field_selector=f"involvedObject.uid={uid}", limit=PAGE,
        )  # fmt: skip
        return [
            event
            for event in page.get("items") or []
            if mapping(event.get("involvedObject")).get("uid", uid) == uid
        ]

    def read_job(self, space: str, name: str) -> Json:
        """Return a Job.

        The status subresource is not used, because reading it needs a right of its own.
        """
        return self._one("read", "Job", space, name, "batch.read_namespaced_job")

    def patch_job(self, space: str, name: str, body: Json) -> Json:
        """Merge a patch into a Job, and return the Job."""
        call = "batch.patch_namespaced_job"
        return self._one("patch", "Job", space, name, call, body=body)

    def delete_job(self, space: str, name: str, uid: str, version: str | None = None) -> None:
        """Delete a Job if it has the given uid, pods first.

        Without a propagation policy the pods would go on running.
        """
        conditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        body = {"propagationPolicy": "Foreground", "preconditions": conditions}
        call = "batch.delete_namespaced_job"
        self._one("delete", "Job", space, name, call, removed=True, body=body)

    def list_runs(self, space: str, selector: str) -> list[str]:
        """Return the runs of all Jobs with these labels, in the order of their creation."""
        known = self._pages(
            f"list Jobs in {space}", ("JobList", "", space), "batch.list_namespaced_job",
            lambda job: (str(job["metadata"].get("creationTimestamp")), run_of(job)),
            label_selector=selector,
        )  # fmt: skip
        return [run_id for _, run_id in sorted(known) if run_id]

    def list_pods(
        self,
        space: str,
        job_uid: str,
        index: int | None = None,
        *,
        versions: list[str] | None = None,
    ) -> list[PodFacts]:
        """Return the pods that a Job owns, or those of one index.

        Pods with the same labels that the Job does not own are left out.

        Args:
            space: The namespace.
            job_uid: The Job.
            index: The only index to return; None for all.
            versions: The resourceVersion of the list is appended to it.
        """
        selector = f"{CONTROLLER_UID}={job_uid}" + ("" if index is None else f",{INDEX}={index}")
        return self._pages(
            f"list pods in {space}", ("PodList", "", space), "core.list_namespaced_pod", read_pod,
            lambda pod: _controls(job_uid, pod), versions, label_selector=selector,
        )  # fmt: skip

    def list_orphans(self, space: str, selector: str) -> list[str]:
        """Return the names of the pods that outlived their Job, which was deleted without them."""

        def lives(pod: Json) -> bool:
            facts = read_pod(pod)
            return facts.phase in {"Pending", "Running"} and not facts.deleting

        return self._pages(
            f"list pods in {space}", ("PodList", "", space), "core.list_namespaced_pod",
            lambda pod: read_pod(pod).name,
            lambda pod: not mappings(pod["metadata"].get("ownerReferences")) and lives(pod),
            label_selector=selector,
        )  # fmt: skip

    def open_log(self, space: str, pod: str, *, endless: bool = True, **query: Any) -> Any:
        """Open the log of our container, to be read piece by piece and closed.

        It is read as bytes, because one version of the client corrupts text. If it is not endless,
        it has to arrive in time, like any other answer.
        """
        with missing_only("Pod", pod):
            return self.client.raw(
                f"read the log of pod {space}/{pod}",
                lambda apis: apis.core.read_namespaced_pod_log(
                    namespace=space,
                    name=pod,
                    container=CONTAINER,
                    timestamps=True,
                    **query,
                    **self.client.options(),
                ),
                endless=endless,
            )

    def read_service_account(self, space: str, name: str) -> Json:
        """Return a service account."""
        call = "core.read_namespaced_service_account"
        return self._one("read", "ServiceAccount", space, name, call)

    def list_quotas(self, space: str) -> list[Json]:
        """Return the resource quotas of a namespace."""
        what, target = f"list ResourceQuotas in {space}", ("ResourceQuotaList", "", space)
        return self._pages(what, target, "core.list_namespaced_resource_quota", dict)

    def list_workloads(self, space: str, job_uid: str) -> list[Json]:
        """Return the Workloads that Kueue made for a Job; others with its label are left out."""
        selector = f"kueue.x-k8s.io/job-uid={job_uid}"
        where = self._kueue_place("workloads")
        answer = self._json(
            f"list Kueue's Workloads in {space}", ("WorkloadList", "", space),
            "custom.list_namespaced_custom_object", label_selector=selector, **where,
        )  # fmt: skip
        return [workload for workload in answer.get("items") or [] if _controls(job_uid, workload)]

    def read_local_queue(self, space: str, name: str) -> Json:
        """Return a local queue of Kueue."""
        where = self._kueue_place("localqueues")
        return self._json(
            f"read Kueue's LocalQueue {space}/{name}", ("LocalQueue", name, space),
            "custom.get_namespaced_custom_object", name=name, **where,
        )  # fmt: skip

    def kueue_version(self) -> str | None:
        """Return the version of Kueue's API to use; None if Kueue is not installed."""
        if self._kueue is None:  # a version that was found once stays
            target = ("APIGroupList", "")
            answer = self._json("list the cluster's APIs", target, "groups.get_api_versions")
            served = {
                version.get("version")
                for group in mappings(answer.get("groups"))
                if group.get("name") == _KUEUE
                for version in mappings(group.get("versions"))
            }
            self._kueue = next((version for version in _KUEUE_VERSIONS if version in served), None)
        return self._kueue

    def _kueue_place(self, plural: str) -> Json:
        version = self.kueue_version()
        if version is None:
            raise MissingError(f"the cluster has no Kueue (no API {_KUEUE}/{_KUEUE_VERSIONS[0]})")
        return {"group": _KUEUE, "version": version, "plural": plural}

    def stop_workload(self, space: str, workload: Json) -> None:
        """Have Kueue evict a Workload and not queue it again, if it is still as it was read.

        Another one may have its name by now.
        """
        name = str(workload["metadata"].get("name"))
        version = workload["metadata"].get("resourceVersion")
        body = {"metadata": {"resourceVersion": version}, "spec": {"active": False}}
        where = self._kueue_place("workloads")
        self._json(
            f"patch Kueue's Workload {space}/{name}", ("Workload", name, space),
            "custom.patch_namespaced_custom_object", name=name, body=body, **where,
        )  # fmt: skip

    def may(self, space: str, verb: str, resource: str, group: str) -> bool:
        """Return whether our account is allowed to do something."""
        plural, _, subresource = resource.partition("/")
        attributes = {
            "namespace": space,
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": subresource,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {key: value for key, value in attributes.items() if value}
            },
        }
        call = "authorization.create_self_subject_access_review"
        target = ("SelfSubjectAccessReview", "")
        answer = self._json("ask what is allowed", target, call, body=body)
        return mapping(answer.get("status")).get("allowed") is True

    def _one(self, verb: str, kind: str, space: str, name: str, call: str, **options: Any) -> Json:
        """Make one call about one object, and return the cluster's own answer."""
        if "within" not in options:  # what is created has its name in its body
            options["name"] = name
        return self._json(f"{verb} {kind} {space}/{name}", (kind, name, space), call, **options)

    def _json(
        self,
        what: str,
        target: tuple[str, ...],
        call: str,
        *,
        warned: list[str] | None = None,
        within: str | None = None,
        removed: bool = False,
        **arguments: Any,
    ) -> Json:
        """Make one call and return the cluster's own answer.

        Args:
            what: What the call does, in words.
            target: The kind that is asked for, the name of the object (empty if none is named), and
                its namespace, if it has one.
            call: The field of :class:`Apis` and the name of its method.
            warned: The cluster's warnings are appended to it.
            within: The namespace in which an object is created; nothing else can be missing then.
            removed: Whether a Status is accepted too, which says that the object is gone.
            **arguments: Further arguments of the call, besides the namespace.
        """
        api, _, method = call.partition(".")
        if target[2:]:
            arguments["namespace"] = target[2]

        def make(apis: Apis) -> Any:
            return getattr(getattr(apis, api), method)(**arguments, **self.client.options())

        with missing_only(*(target[:2] if within is None else ("Namespace", within))):
            answer = self.client.call(what, make, warned)
        return own_answer(answer, what, *target, removed=removed)

    def _pages(
        self,
        what: str,
        target: tuple[str, ...],
        call: str,
        read: Callable[[Json], T],
        wanted: Callable[[Json], bool] = lambda _: True,
        versions: list[str] | None = None,
        **arguments: Any,
    ) -> list[T]:
        """Return what ``read`` keeps of the items of a list.

        No more of a page is kept, since the size of all pages together has no limit.
        """
        for last in (False, False, True):
            try:
                results, version = self._all_pages(what, target, call, read, wanted, arguments)
            except ExpiredError:
                if last:
                    raise
                continue
            if versions is not None:
                versions.append(version)
            return results
        raise AssertionError("the last try returns or raises")

    def _all_pages(
        self,
        what: str,
        target: tuple[str, ...],
        call: str,
        read: Callable[[Json], T],
        wanted: Callable[[Json], bool],
        arguments: Json,
    ) -> tuple[list[T], str]:
        results: list[T] = []
        token: str | None = None
        objects, kept, up = 0, 0, self.client.time_up()
        for _ in range(_PAGES):
            place: Json = {"limit": PAGE} | ({"_continue": token} if token else {})
            page = self._json(what, target, call, **arguments, **place)
            items = page.get("items") or []
            objects += len(items)
            for facts in map(read, filter(wanted, items)):
                results.append(facts)
                kept += len(repr(facts))
                if kept > _KEPT:
                    raise UnavailableError(f"cannot {what}: they say more than {_KEPT} characters")
            metadata = mapping(page.get("metadata"))
            last, token = token, metadata.get("continue")
            del page, items  # otherwise two pages would be in memory when the next one is read
            if not token:
                return results, str(metadata.get("resourceVersion"))
            if token == last:  # such as from a cache that cannot tell pages apart
                raise UnavailableError(f"cannot {what}: its second page is the first one again")
            if objects > _OBJECTS or time.monotonic() > up:
                break
        raise UnavailableError(
            f"cannot {what}: the list does not come to an end: after {objects} objects it was "
            "given up"
        )


def _controls(uid: str, owned: Json) -> bool:
    """Return whether an object's controller has this uid."""
    return any(
        owner.get("uid") == uid and owner.get("controller") is True
        for owner in mappings(owned["metadata"].get("ownerReferences"))
    )
