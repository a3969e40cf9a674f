"""Selectors, pages and watches, through the real client."""

from __future__ import annotations

import base64
import contextlib
import json
import threading

import pytest
from kubernetes import watch
from standin_lab import PATIENCE

from diloco_localcloud._kubernetes._api import _query as _selectors

LABELS = {
    "a": {"app": "x", "tier": "1"},
    "b": {"app": "x"},
    "c": {"app": "y", "tier": "2"},
    "d": {},
}


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("", "abcd"),
        ("app=x", "ab"),
        ("app==x,tier=1", "a"),
        ("tier", "ac"),
        ("app=", ""),
    ],
)
def test_label_selectors(selector, names):
    test = _selectors.by_labels(selector)
    assert (
        "".join(name for name, labels in LABELS.items() if test({"metadata": {"labels": labels}}))
        == names
    )


def test_pods_are_chosen_by_labels_and_fields(clients):
    clients.running(clients.indexed("run", 3))
    clients.world.pod("run", 1, "ns").fail(1)
    clients.world.advance(1.2)
    index = "batch.kubernetes.io/job-completion-index"
    chosen = clients.pods(label_selector=f"{index}=1", field_selector="status.phase=Failed")
    assert [pod["metadata"]["labels"][index] for pod in chosen] == ["1"]
    node = clients.pods(field_selector="spec.nodeName=stand-in-0")
    assert len(node) == 3


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_pages(clients, limit):
    clients.create(clients.indexed("run", 7))
    clients.world.settle()
    names, token, pages = [], None, 0
    while pages == 0 or token:
        page = clients.core.list_namespaced_pod(
            namespace="ns", limit=limit, **({"_continue": token} if token else {})
        )
        names += [pod.metadata.name for pod in page.items]
        token, pages = page.metadata._continue, pages + 1
        assert len(page.items) <= limit
        assert (page.metadata.remaining_item_count or 0) == 7 - len(names)
    assert len(set(names)) == len(names) == 7
    assert pages == -(-7 // limit)


def test_a_limit_below_nothing_is_none(clients):
    clients.create(clients.indexed("run", 2))
    clients.world.settle()
    page = clients.core.list_namespaced_pod(namespace="ns", limit=-1)
    assert (len(page.items), page.metadata._continue) == (2, None)


@pytest.mark.parametrize(
    "mark",
    [
        {"namespace": 5, "name": "a", "version": 5},
        {"namespace": "", "name": None, "version": 5},
        {"namespace": "", "name": "a", "version": "5"},
        {"namespace": "", "name": "a", "version": True},
    ],
)
def test_a_token_that_is_none_of_ours(clients, mark):
    token = base64.urlsafe_b64encode(json.dumps(mark).encode()).decode()
    with clients.refused(400, "BadRequest", "continue key is not valid"):
        clients.core.list_namespaced_pod(namespace="ns", _continue=token)


def test_jobs_of_all_namespaces(clients):
    clients.core.create_namespace(body={"metadata": {"name": "other"}})
    clients.create(clients.indexed("run", 1))
    clients.batch.create_namespaced_job(namespace="other", body=clients.indexed("run", 1))
    everywhere = clients.plain(clients.batch.list_job_for_all_namespaces())["items"]
    assert [job["metadata"]["namespace"] for job in everywhere] == ["ns", "other"]
    assert len(clients.plain(clients.batch.list_namespaced_job(namespace="other"))["items"]) == 1


def follow(clients, seen, done, **query):
    stream = watch.Watch()
    for event in stream.stream(
        clients.core.list_namespaced_pod, namespace="ns", timeout_seconds=30, **query
    ):
        pod = clients.plain(event["object"])
        seen.append(
            (event["type"], pod["metadata"].get("labels", {}).get("a"), pod["status"]["phase"])
        )
        if done(seen):
            stream.stop()


def plain_pod(name, **labels):
    spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "any"}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


@pytest.mark.processes
def test_a_watch_sees_what_comes_and_goes(clients):
    seen: list[tuple] = []
    clients.core.create_namespaced_pod(namespace="ns", body=plain_pod("one", a="1"))
    begun = threading.Event()

    def is_over(events):
        begun.set()
        return events[-1][0] == "DELETED"

    watching = threading.Thread(target=follow, args=(clients, seen, is_over))
    watching.start()
    assert begun.wait(PATIENCE)  # what happens before is not seen
    clients.world.settle()
    clients.world.pods(namespace="ns")[0].start()
    clients.core.delete_namespaced_pod(name="one", namespace="ns")
    clients.world.settle()
    watching.join(PATIENCE)
    assert not watching.is_alive()
    assert seen[0][0] == "ADDED"
    assert ("MODIFIED", "1", "Running") in seen
    assert seen[-1][0] == "DELETED"


def test_a_watch_that_would_list_is_refused_so_that_clients_list_themselves(clients):
    query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
    answer, _ = clients.raw("GET", f"/api/v1/namespaces/ns/pods?{query}")
    assert (answer["code"], answer["reason"]) == (422, "Invalid")
    assert "sendInitialEvents: Forbidden" in answer["message"]


def test_to_leave_the_selection_is_to_be_deleted(clients):
    clients.core.create_namespaced_pod(namespace="ns", body=plain_pod("one", a="1"))
    version = clients.core.list_namespaced_pod(namespace="ns").metadata.resource_version
    clients.core.patch_namespaced_pod(
        name="one", namespace="ns", body={"metadata": {"labels": {"a": "2"}}}
    )
    clients.core.patch_namespaced_pod(
        name="one", namespace="ns", body={"metadata": {"labels": {"a": "1"}}}
    )
    seen: list[tuple] = []
    follow(
        clients, seen, lambda all_: len(all_) == 2, label_selector="a=1", resource_version=version
    )
    assert [(kind, label) for kind, label, _ in seen] == [
        ("DELETED", "1"),
        ("ADDED", "1"),
    ]  # the one that was chosen goes


@pytest.mark.processes
def test_a_watch_ends_in_time(clients):
    stream = watch.Watch()
    assert (
        list(stream.stream(clients.core.list_namespaced_pod, namespace="ns", timeout_seconds=1))
        == []
    )


@pytest.mark.processes
def test_a_stop_ends_the_watches(clients):
    ended = threading.Event()

    def look():
        stream = watch.Watch()
        with contextlib.suppress(
            Exception
        ):  # the client may see the port closed when it asks again
            list(
                stream.stream(clients.core.list_namespaced_pod, namespace="ns", timeout_seconds=60)
            )
        ended.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    while not clients.stand_in.calls.count("watch", "pods"):
        thread.join(0.01)
    clients.stand_in.stop()
    assert ended.wait(PATIENCE)
