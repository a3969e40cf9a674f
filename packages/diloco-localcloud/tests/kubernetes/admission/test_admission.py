"""What is asked of pods: a Job is accepted whatever its template is, and its pods are not."""

from __future__ import annotations

import pytest

COMPLIES = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "main",
            "image": "any:1",
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
    ],
}
PRIVILEGED = {
    "containers": [{"name": "main", "image": "any:1", "securityContext": {"privileged": True}}]
}


def label(clients, **labels):
    keys = {f"pod-security.kubernetes.io/{mode}": level for mode, level in labels.items()}
    clients.core.patch_namespace(name="ns", body={"metadata": {"labels": keys}})


def events(clients, reason):
    listed = clients.core.list_namespaced_event(namespace="ns", field_selector=f"reason={reason}")
    return [(event.message, event.count) for event in listed.items]


def make(clients, n=1, **template):
    clients.create(clients.indexed("run", n, template=template))
    clients.world.settle()
    return len(clients.world.pods("run", "ns"))


@pytest.mark.parametrize(
    ("level", "template", "made"),
    [
        ("restricted", {}, 0),
        ("restricted", COMPLIES, 1),
        ("baseline", {}, 1),
        ("baseline", {"hostNetwork": True}, 0),
        ("baseline", PRIVILEGED, 0),
        ("baseline", {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, 0),
        ("privileged", PRIVILEGED, 1),
    ],
)
def test_pod_security(clients, level, template, made):
    label(clients, enforce=level)
    assert make(clients, **template) == made
    assert len(events(clients, "FailedCreate")) == 1 - made


def test_a_job_is_warned_of_and_not_refused(clients):
    label(clients, warn="restricted")
    path = "/apis/batch/v1/namespaces/ns/jobs"
    _, headers = clients.raw("POST", f"{path}?dryRun=All", clients.indexed())
    assert headers["Warning"].startswith(
        '299 - "would violate PodSecurity \\"restricted:latest\\": '
    )
    _, headers = clients.raw("POST", path, clients.indexed("other", template=COMPLIES))
    assert headers["Warning"] is None


def test_a_quota_lets_in_as_many_as_it_has_room_for(clients):
    body = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
    clients.core.create_namespaced_resource_quota(namespace="ns", body=body)
    assert make(clients, 3) == 2
    ((message, _),) = events(clients, "FailedCreate")
    assert message.endswith(
        "is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2"
    )
    (quota,) = clients.core.list_namespaced_resource_quota(namespace="ns").items
    assert (quota.status.hard, quota.status.used) == ({"pods": "2"}, {"pods": "2"})
    assert clients.job("run")["status"]["active"] == 2
    clients.world.pod("run", 0, "ns").start()
    clients.world.pod("run", 0, "ns").succeed()
    clients.world.settle(within=12)
    assert len(clients.world.pods("run", "ns")) == 3  # there is room now


@pytest.mark.parametrize(
    "scopes",
    [
        {"scopes": ["BestEffort"]},
        {
            "scopeSelector": {
                "matchExpressions": [{"scopeName": "PriorityClass", "operator": "Exists"}]
            }
        },
    ],
)
def test_a_quota_with_scopes_is_kept_without_an_effect(clients, scopes):
    body = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}, **scopes}}
    clients.core.create_namespaced_resource_quota(namespace="ns", body=body)
    assert make(clients, 2) == 2
    (quota,) = clients.core.list_namespaced_resource_quota(namespace="ns").items
    assert quota.status.used == {"pods": "0"}


@pytest.mark.parametrize(
    "spec", [{"hard": 5}, {"scopes": 5}, {"scopeSelector": {"matchExpressions": [5]}}]
)
def test_a_quota_of_the_wrong_types_is_refused(clients, spec):
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "odd"}, "spec": spec}
    with clients.refused(400, "BadRequest", "cannot be handled as a ResourceQuota"):
        clients.core.create_namespaced_resource_quota(namespace="ns", body=body)


def test_what_a_quota_counts_must_be_given(clients):
    body = {"metadata": {"name": "small"}, "spec": {"hard": {"limits.memory": "2Gi"}}}
    clients.core.create_namespaced_resource_quota(namespace="ns", body=body)
    assert make(clients) == 0
    ((message, _),) = events(clients, "FailedCreate")
    assert "failed quota: small: must specify limits.memory for: main" in message


def test_a_limit_range_refuses(clients):
    body = {
        "metadata": {"name": "limits"},
        "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]},
    }
    clients.core.create_namespaced_limit_range(namespace="ns", body=body)
    assert make(clients) == 0
    ((message, _),) = events(clients, "FailedCreate")
    assert "maximum cpu usage per Container is 1.  No limit is specified" in message
    main = {"name": "main", "image": "any:1", "resources": {"limits": {"cpu": "2"}}}
    body = {
        "metadata": {"name": "large"},
        "spec": {"restartPolicy": "Never", "containers": [main]},
    }
    with clients.refused(403, "Forbidden", "maximum cpu usage per Container is 1, but limit is 2"):
        clients.core.create_namespaced_pod(namespace="ns", body=body, dry_run="All")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "Pod", "max": {"cpu": "1"}},
        {"type": "Container", "default": {"cpu": "1"}},
        {"type": "Container", "min": {"cpu": "1"}},
    ],
)
def test_what_of_a_limit_range_is_not_served_is_named(clients, item):
    body = {"metadata": {"name": "limits"}, "spec": {"limits": [item]}}
    with clients.refused(422, "Invalid", r"spec.limits\[0\]: Forbidden: .* serves max alone"):
        clients.core.create_namespaced_limit_range(namespace="ns", body=body)


@pytest.mark.parametrize(
    ("field", "path", "message"),
    [
        ("runtimeClassName", "/apis/node.k8s.io/v1/runtimeclasses", 'RuntimeClass "x" not found'),
        (
            "priorityClassName",
            "/apis/scheduling.k8s.io/v1/priorityclasses",
            "no PriorityClass with name x was found",
        ),
    ],
)
def test_classes_must_exist(clients, field, path, message):
    assert make(clients, **{field: "x"}) == 0
    ((said, _),) = events(clients, "FailedCreate")
    assert message in said
    clients.raw("POST", path, {"metadata": {"name": "x"}, "handler": "x", "value": 7})
    clients.world.settle(within=12)
    pod = clients.world.pod("run", 0, "ns").json
    assert pod["spec"]["priority"] == (7 if field == "priorityClassName" else 0)
