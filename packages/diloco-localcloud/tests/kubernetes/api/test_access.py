"""Who may do what: rules as in a Role."""

from __future__ import annotations

from kubernetes import client


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
        'jobs.batch is forbidden: User "stand-in-user" cannot create resource "jobs" in API group '
        '"batch" in the namespace "ns"'
    )
    with clients.refused(403, "Forbidden", message):
        clients.create(clients.indexed("other", 1))
    with clients.refused(
        403,
        "Forbidden",
        f'pods "{name}" is forbidden: .* cannot get resource "pods/log" in API group ""',
    ):
        clients.log(name)
    with clients.refused(403, "Forbidden", "at the cluster scope"):
        clients.core.list_node()
    clients.stand_in.access.only(None)
    clients.create(clients.indexed("other", 1))


def test_rules_for_names(clients):
    for name in ("mine", "other"):
        clients.create(clients.indexed(name, 1))
    clients.stand_in.access.only(
        [
            {
                "apiGroups": ["batch"],
                "resources": ["jobs"],
                "verbs": ["get"],
                "resourceNames": ["mine"],
            }
        ]
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
