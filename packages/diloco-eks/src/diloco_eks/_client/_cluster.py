"""The calls to the cluster, one method each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from diloco_protocol import InvalidRequestError, UnavailableError

from .._request._names import CONTAINER, CONTROLLER_UID, INDEX
from .._state._facts import PodFacts
from .._state._reading import mapping, mappings, read_pod, run_of
from ._answers import missing_only, own_answer
from ._client import Client, Request
from ._errors import MissingError

T = TypeVar("T")
Json = dict[str, Any]
PAGE = 250
_OBJECTS, _PAGES = 100_000, 1000  # of one list, at most
_KEPT = 1 << 27  # characters that are kept of a list
_METHODS = {"create": "POST", "read": "GET", "list": "GET", "patch": "PATCH", "delete": "DELETE"}
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
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        try:
            return self._one("create", "Job", space, name, query, manifest, warned=warned)
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
        self._one("create", "Pod", space, "", {"fieldValidation": "Strict", "dryRun": "All"}, body)

    def list_events(self, space: str, uid: str) -> list[Json]:
        """Return one page of the events of an object, since there may be any number of them."""
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": PAGE}
        return [
            event
            for event in self._one("list", "Event", space, "", query).get("items") or []
            if mapping(event.get("involvedObject")).get("uid", uid) == uid
        ]

    def read_job(self, space: str, name: str) -> Json:
        """Return a Job.

        The status subresource is not used, because reading it needs a right of its own.
        """
        return self._one("read", "Job", space, name)

    def patch_job(self, space: str, name: str, body: Json) -> Json:
        """Merge a patch into a Job, and return the Job."""
        return self._one("patch", "Job", space, name, body=body)

    def delete_job(self, space: str, name: str, uid: str, version: str | None = None) -> None:
        """Delete a Job if it has the given uid, pods first.

        Without a propagation policy the pods would go on running.
        """
        conditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        body = {"propagationPolicy": "Foreground", "preconditions": conditions}
        self._one("delete", "Job", space, name, body=body)

    def list_runs(self, space: str, selector: str) -> list[str]:
        """Return the runs of all Jobs with these labels, in the order of their creation."""
        known, _ = self._pages(
            "Job",
            space,
            {"labelSelector": selector},
            lambda job: (str(job["metadata"].get("creationTimestamp")), run_of(job)),
        )
        return [run_id for _, run_id in sorted(known) if run_id]

    def list_pods(
        self, space: str, job_uid: str, index: int | None = None
    ) -> tuple[list[PodFacts], str]:
        """Return the pods that a Job owns, or those of one index, and the list's resourceVersion.

        Pods with the same labels that the Job does not own are left out.
        """
        selector = f"{CONTROLLER_UID}={job_uid}" + ("" if index is None else f",{INDEX}={index}")
        query = {"labelSelector": selector}
        return self._pages("Pod", space, query, read_pod, lambda pod: _controls(job_uid, pod))

    def list_orphans(self, space: str, selector: str) -> list[str]:
        """Return the names of the pods that outlived their Job, which was deleted without them."""

        def lives(pod: Json) -> bool:
            facts = read_pod(pod)
            owned = mappings(pod["metadata"].get("ownerReferences"))
            return facts.phase in {"Pending", "Running"} and not facts.deleting and not owned

        query = {"labelSelector": selector}
        return self._pages("Pod", space, query, lambda pod: read_pod(pod).name, lives)[0]

    def open_log(
        self,
        space: str,
        pod: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        endless: bool = True,
    ) -> Any:
        """Open the log of our container, to be read piece by piece and closed.

        Args:
            space: The namespace.
            pod: Name of the pod.
            follow: Whether to wait for further lines.
            tail: How many lines to read, from the end; None for all.
            endless: Whether it may take any time; else it has to arrive like any other answer.
        """
        query: Json = {"container": CONTAINER, "timestamps": "true"}
        query |= ({"follow": "true"} if follow else {}) | ({"tailLines": tail} if tail else {})
        path, what = f"{self._path('Pod', space, pod)}/log", f"read the log of pod {space}/{pod}"
        with missing_only("Pod", pod):
            return self.client.open(Request(what, "GET", path, query), endless=endless)

    def read_service_account(self, space: str, name: str) -> Json:
        """Return a service account."""
        return self._one("read", "ServiceAccount", space, name)

    def list_quotas(self, space: str) -> list[Json]:
        """Return the resource quotas of a namespace."""
        return self._pages("ResourceQuota", space, {}, dict)[0]

    def list_workloads(self, space: str, job_uid: str) -> list[Json]:
        """Return the Workloads that Kueue made for a Job; others with its label are left out."""
        query = {"labelSelector": f"kueue.x-k8s.io/job-uid={job_uid}"}
        found = self._one("list", "Workload", space, "", query).get("items") or []
        return [workload for workload in found if _controls(job_uid, workload)]

    def read_local_queue(self, space: str, name: str) -> Json:
        """Return a local queue of Kueue."""
        return self._one("read", "LocalQueue", space, name)

    def kueue_version(self) -> str | None:
        """Return the version of Kueue's API to use; None if Kueue is not installed."""
        if self._kueue is None:  # a version that was found once stays
            what = "list the cluster's APIs"
            answer = self.client.call(Request(what, "GET", "/apis"))
            answer = own_answer(answer, what, "APIGroupList")
            served = {
                version.get("version")
                for group in mappings(answer.get("groups"))
                if group.get("name") == _KUEUE
                for version in mappings(group.get("versions"))
            }
            self._kueue = next((version for version in _KUEUE_VERSIONS if version in served), None)
        return self._kueue

    def stop_workload(self, space: str, workload: Json) -> None:
        """Have Kueue evict a Workload and not queue it again, if it is still as it was read.

        Another one may have its name by now.
        """
        version = workload["metadata"].get("resourceVersion")
        body = {"metadata": {"resourceVersion": version}, "spec": {"active": False}}
        self._one("patch", "Workload", space, str(workload["metadata"].get("name")), body=body)

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
        kind, api = "SelfSubjectAccessReview", "authorization.k8s.io/v1"
        body = {
            "apiVersion": api,
            "kind": kind,
            "spec": {
                "resourceAttributes": {key: value for key, value in attributes.items() if value}
            },
        }
        what, path = "ask what is allowed", f"/apis/{api}/selfsubjectaccessreviews"
        answer = self.client.call(Request(what, "POST", path, body=body))
        answer = own_answer(answer, what, kind)
        return mapping(answer.get("status")).get("allowed") is True

    def _path(self, kind: str, space: str, name: str = "") -> str:
        api = "/apis/batch/v1" if kind == "Job" else "/api/v1"
        if kind in {"Workload", "LocalQueue"}:
            version = self.kueue_version()
            if version is None:
                raise MissingError(
                    f"the cluster has no Kueue (no API {_KUEUE}/{_KUEUE_VERSIONS[0]})"
                )
            api = f"/apis/{_KUEUE}/{version}"
        path = f"{api}/namespaces/{quote(space, safe='')}/{kind.lower()}s"
        return f"{path}/{quote(name, safe='')}" if name else path

    def _one(
        self,
        verb: str,
        kind: str,
        space: str,
        name: str,
        query: Mapping[str, Any] | None = None,
        body: Json | None = None,
        *,
        warned: list[str] | None = None,
    ) -> Json:
        """Make one call about one object or a list, and return the cluster's own answer.

        Args:
            verb: create, read, list, patch or delete.
            kind: The kind of the object, or of those in the list.
            space: The namespace.
            name: Name of the object; empty if none is named.
            query: Parameters of the call.
            body: JSON to send.
            warned: The cluster's warnings are appended to it.
        """
        created, listed = verb == "create", verb == "list"
        what = (
            f"{verb} {kind}s in {space}"
            if listed
            else f"{verb} {kind} {space}/{name or '(a dry run)'}"
        )
        path = self._path(kind, space, "" if created else name)
        # Where an object is created, nothing but its namespace can be missing.
        with missing_only("Namespace", space) if created else missing_only(kind, name):
            request = Request(what, _METHODS[verb], path, query or {}, body)
            answer = self.client.call(request, warned)
        kind += "List" if listed else ""
        return own_answer(answer, what, kind, name, space, removed=verb == "delete")

    def _pages(
        self,
        kind: str,
        space: str,
        query: Json,
        read: Callable[[Json], T],
        wanted: Callable[[Json], bool] = lambda _: True,
    ) -> tuple[list[T], str]:
        """Return what ``read`` keeps of the wanted objects of a list, and its resourceVersion.

        No more of a page is kept, since the size of all pages together has no limit.
        """
        results: list[T] = []
        token: str | None = None
        objects, kept, up = 0, 0, self.client.time_up()
        what = f"list {kind}s in {space}"
        for _ in range(_PAGES):
            place: Json = {"limit": PAGE} | ({"continue": token} if token else {})
            page = self._one("list", kind, space, "", query | place)
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
