"""Faults on demand, rules and counts, at the level of HTTP."""

from __future__ import annotations

import pytest
import urllib3.exceptions
from kubernetes import client


def test_throttling(clients):
    clients.stand_in.faults.add("throttle", verb="get", resource="jobs", retry_after=7)
    clients.create(clients.indexed("run", 1))
    with clients.refused(429, "TooManyRequests", "try again later") as caught:
        clients.job("run")
    assert caught.value.headers["Retry-After"] == "7"
    clients.job("run")


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("server_error", 500, "InternalError"),
        ("unavailable", 503, "ServiceUnavailable"),
        ("unauthorized", 401, "Unauthorized"),
        ("forbidden", 403, "Forbidden"),
        ("expired", 410, "Expired"),
    ],
)
def test_failures(clients, kind, status, reason):
    clients.create(clients.indexed("run", 1))
    clients.stand_in.faults.add(kind, times=2)
    for _ in range(2):
        with clients.refused(status, reason, ""):
            clients.job("run")
    clients.job("run")


@pytest.mark.parametrize(("kind", "exists"), [("cut", False), ("ambiguous", True)])
def test_a_create_whose_answer_is_lost(clients, kind, exists):
    clients.stand_in.faults.add(kind, verb="create", resource="jobs")
    with pytest.raises(urllib3.exceptions.HTTPError):
        clients.create(clients.indexed("run", 1))
    names = [job.metadata.name for job in clients.batch.list_namespaced_job(namespace="ns").items]
    assert names == (["run"] if exists else [])
    assert [call.status for call in clients.stand_in.calls if call.verb == "create"] == [0]


def test_faults_until_cleared(clients):
    clients.stand_in.faults.add("unavailable", resource="jobs", times=None)
    for _ in range(3):
        with clients.refused(503, "ServiceUnavailable", ""):
            clients.job("run")
    assert clients.pods() == []
    clients.stand_in.faults.clear()
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")


def test_an_unknown_fault(stand_in):
    with pytest.raises(ValueError, match="there is no fault 'explode'; there are throttle"):
        stand_in.faults.add("explode")


def test_calls_are_counted(clients):
    clients.create(clients.indexed("run", 1))
    clients.job("run")
    clients.job("run")
    clients.pods()
    calls = clients.stand_in.calls
    assert (calls.count(), calls.count("get"), calls.count("get", "jobs"), calls.count("list", "pods")) == (4, 2, 2, 1)
    assert [(call.verb, call.resource, call.name, call.status) for call in calls][:2] == [
        ("create", "jobs", "", 201),
        ("get", "jobs", "run", 200),
    ]
    calls.clear()
    assert len(calls) == 0


def test_nothing_listens_any_more(clients):
    clients.stand_in.stop()
    with pytest.raises(urllib3.exceptions.HTTPError):
        clients.job("run")


def may(clients, verb, resource, group=""):
    wanted = {"verb": verb, "resource": resource, "group": group, "namespace": "ns"}
    body = {"spec": {"resourceAttributes": wanted}}
    answer = client.AuthorizationV1Api(clients.api).create_self_subject_access_review(body=body)
    return clients.plain(answer)["status"]["allowed"]


def test_rules_of_a_role(clients):
    clients.create(clients.indexed("run", 1))
    clients.world.settle()
    assert may(clients, "create", "jobs", "batch")
    rules = [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]},
    ]
    clients.stand_in.access.only(rules)
    clients.job("run")
    name = clients.pods()[0]["metadata"]["name"]
    assert [
        may(clients, "create", "jobs", "batch"),
        may(clients, "get", "jobs", "batch"),
        may(clients, "get", "pods"),
    ] == [
        False,
        True,
        True,
    ]
    message = (
        'jobs.batch is forbidden: User "stand-in-user" cannot create resource "jobs" in API group "batch" '
        'in the namespace "ns"'
    )
    with clients.refused(403, "Forbidden", message):
        clients.create(clients.indexed("other", 1))
    with clients.refused(
        403, "Forbidden", f'pods "{name}" is forbidden: .* cannot get resource "pods/log" in API group ""'
    ):
        clients.log(name)
    with clients.refused(403, "Forbidden", 'cannot get resource "jobs/status"'):
        clients.batch.read_namespaced_job_status(name="run", namespace="ns")
    with clients.refused(403, "Forbidden", "at the cluster scope"):
        clients.core.list_node()
    clients.stand_in.access.only(None)
    clients.create(clients.indexed("other", 1))


def test_rules_for_names(clients):
    for name in ("mine", "other"):
        clients.create(clients.indexed(name, 1))
    clients.stand_in.access.only(
        [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"], "resourceNames": ["mine"]}]
    )
    clients.job("mine")
    with clients.refused(403, "Forbidden", 'jobs.batch "other" is forbidden'):
        clients.job("other")


def test_one_verb_denied(clients):
    clients.stand_in.access.deny("patch", "jobs")
    clients.create(clients.indexed("run", 1))
    with clients.refused(403, "Forbidden", 'jobs.batch "run" is forbidden: .* cannot patch'):
        clients.patch("run", {"spec": {"suspend": True}})
    clients.stand_in.access.allow("patch", "jobs")
    clients.patch("run", {"spec": {"suspend": True}})
