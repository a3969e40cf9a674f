"""What is refused, with the words and reasons of the real server."""

from __future__ import annotations

import pytest

MAIN = {"name": "main", "image": "any:1"}


def changed(body, path, value):
    """The manifest with one value set, or taken out."""
    place = body
    for step in path[:-1]:
        place = place[step]
    if value is None:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return body


def container(**more):
    return {"restartPolicy": "Never", "containers": [{**MAIN, **more}]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"completions": None},
            "spec.completions: Required value: when completion mode is Indexed",
        ),
        (
            {"maxFailedIndexes": 0},
            "spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified",
        ),
        (
            {"parallelism": 100_001},
            "spec.parallelism: Invalid value: 100001: must be less than or equal to 100000",
        ),
        (
            {"backoffLimit": -1},
            "spec.backoffLimit: Invalid value: -1: must be greater than or equal to 0",
        ),
        ({"completions": None, "completionMode": None}, "spec.completions: Required value"),
        ({"completionMode": "indexed"}, 'spec.completionMode: Unsupported value: "indexed"'),
        ({"completionMode": None, "backoffLimitPerIndex": 1}, "requires indexed completion mode"),
        ({"template": {}}, "spec.template.spec.containers: Required value"),
        (
            {"podFailurePolicy": {"rules": []}, "podReplacementPolicy": "TerminatingOrFailed"},
            (
                'spec.podReplacementPolicy: Unsupported value: "TerminatingOrFailed": supported '
                'values: "Failed"'
            ),
        ),
        (
            {
                "podFailurePolicy": {
                    "rules": [{"action": "Stop", "onExitCodes": {"operator": "In", "values": [1]}}]
                }
            },
            r"rules\[0\]: Invalid value: .*'Stop'.* needs an action of Count, FailJob, Ignore ",
        ),
        (
            {
                "podFailurePolicy": {
                    "rules": [
                        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [1]}}
                    ]
                }
            },
            "FailIndex with backoffLimitPerIndex alone",
        ),
        (
            {"podFailurePolicy": {"rules": [{"action": "Ignore"}]}},
            "either onExitCodes, of a container of the template if one is named, or onPodC",
        ),
    ],
)
def test_jobs_that_are_invalid(clients, spec, message):
    body = clients.indexed("run", 2)
    body["spec"] = {
        key: value for key, value in {**body["spec"], **spec}.items() if value is not None
    }
    with clients.refused(422, "Invalid", message):
        clients.create(body)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            {"restartPolicy": "Always"},
            "template.spec.restartPolicy: Forbidden: .* serves Never alone",
        ),
        (
            container(name="Main"),
            r'containers\[0\].name: Invalid value: "Main": a lowercase RFC 1123 label',
        ),
        (container(image=""), r"containers\[0\].image: Required value"),
        (container(env=[{"name": "a=b", "value": "c"}]), r"env\[0\].name: Invalid value"),
        (
            container(volumeMounts=[{"name": "no", "mountPath": "/x"}]),
            r'volumeMounts\[0\].name: Not found: "no"',
        ),
        (
            container(resources={"requests": {"nvidia.com/gpu": "1"}}),
            "Limit must be set for non overcommitable resources",
        ),
        (
            container(
                resources={"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "2"}}
            ),
            "must be equal to nvidia.com/gpu limit of 1",
        ),
        (
            container(resources={"limits": {"cpu": "1"}, "requests": {"cpu": "1500m"}}),
            "less than or equal to cpu limit of 1",
        ),
        ({"containers": [MAIN, MAIN]}, r'containers\[1\].name: Duplicate value: "main"'),
    ],
)
def test_templates_that_are_invalid(clients, template, message):
    with clients.refused(422, "Invalid", message):
        clients.create(clients.indexed("run", 2, template=template))


@pytest.mark.parametrize(
    ("name", "n", "accepted"),
    [
        ("a" * 61, 4, True),
        ("a" * 62, 4, False),
        ("a" * 61, 11, False),
        ("My-Run", 2, False),
        ("a_b", 2, False),
        ("a.b", 2, False),
    ],
)
def test_names_must_leave_room_for_the_index(clients, name, n, accepted):
    if accepted:
        clients.create(clients.indexed(name, n))
        clients.world.settle()
        assert all(len(pod["metadata"]["name"]) <= 63 for pod in clients.pods())
        assert clients.pods()[0]["spec"]["hostname"] == f"{name}-0"
    else:
        with clients.refused(422, "Invalid", "metadata.name: Invalid value"):
            clients.create(clients.indexed(name, n))


@pytest.mark.parametrize(
    ("labels", "accepted"),
    [({"a": "b/c"}, False), ({"a": "x" * 64}, False), ({"d.io/a": "b"}, True)],
)
def test_labels(clients, labels, accepted):
    body = clients.indexed("run", 1)
    body["metadata"]["labels"] = labels
    if accepted:
        assert labels.items() <= clients.create(body)["metadata"]["labels"].items()
    else:
        with clients.refused(422, "Invalid", "metadata.labels"):
            clients.create(body)


def test_labels_that_are_the_controllers(clients):
    body = clients.indexed("run", 1)
    body["spec"]["template"]["metadata"] = {"labels": {"job-name": "other"}}
    with clients.refused(422, "Invalid", "must be 'run'"):
        clients.create(body)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("spec", "template", "spec", "containers", 0, "env"),
            [{"name": "A", "value": 1}],
            "cannot unmarshal number",
        ),
        (("spec", "completions"), "two", "cannot unmarshal"),
        (
            ("spec", "template", "spec", "containers", 0, "resources"),
            {"limits": {"memory": "1 GB"}},
            "quantities must match",
        ),
        (("kind",), "Pod", "cannot be handled as a Job"),
        (("apiVersion",), "batch/v2", "cannot be handled as a Job"),
    ],
)
def test_bodies_that_cannot_be_decoded(clients, path, value, message):
    body = changed(clients.indexed("run", 1), path, value)
    answer = clients.raw("POST", "/apis/batch/v1/namespaces/ns/jobs", body)[0]
    assert (answer["code"], answer["reason"]) == (400, "BadRequest")
    assert message in answer["message"]


@pytest.mark.parametrize("text", ["a", "YQ=", "Y!Q=", "YQé=", "YQ==YQ==x"])
def test_a_secret_that_is_not_base64(clients, text):
    with clients.refused(400, "BadRequest", "handled as a Secret: illegal base64 data"):
        body = {"metadata": {"name": "s"}, "data": {"k": text}}
        clients.core.create_namespaced_secret(namespace="ns", body=body)


@pytest.mark.parametrize(
    ("volume", "field"),
    [
        ({"emptyDir": {}}, "name"),
        ({"name": "v", "configMap": {}}, "configMap.name"),
        ({"name": "v", "secret": {"optional": True}}, "secret.secretName"),
        (
            {"name": "v", "secret": {"secretName": "s", "items": [{"path": "p"}]}},
            r"secret.items\[0\].key",
        ),
        (
            {"name": "v", "configMap": {"name": "c", "items": [{"key": "k"}]}},
            r"configMap.items\[0\].path",
        ),
    ],
)
def test_volumes_of_which_a_part_is_missing(clients, volume, field):
    with clients.refused(
        422, "Invalid", rf"spec.template.spec.volumes\[0\].{field}: Required value"
    ):
        clients.create(clients.indexed("run", 1, template={"volumes": [volume]}))


def test_a_volume_of_two_kinds(clients):
    volume = {"name": "v", "configMap": {"name": "c"}, "emptyDir": {}, "hostPath": None}
    words = r"spec.template.spec.volumes\[0\]: Forbidden: may not specify more than 1 volum"
    with clients.refused(422, "Invalid", words):
        clients.create(clients.indexed("run", 1, template={"volumes": [volume]}))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/etc/x", "must be a relative path"),
        ("../x", "must not contain '..'"),
        ("a/../../x", "must not contain '..'"),
        ("..", "must not contain '..'"),
    ],
)
@pytest.mark.parametrize("part", ["items", "subPath"])
def test_paths_that_leave_their_volume(clients, path, words, part):
    items = [{"key": "k", "path": path if part == "items" else "..x/y..z"}]
    volume = {"name": "v", "configMap": {"name": "c", "items": items}}
    mount = {"name": "v", "mountPath": "/v", "subPath": path if part == "subPath" else "y..z"}
    field = (
        r"volumes\[0\].configMap.items\[0\].path"
        if part == "items"
        else r"volumeMounts\[0\].subPath"
    )
    with clients.refused(422, "Invalid", rf"{field}: Invalid value: .*: {words}"):
        spec = {**container(volumeMounts=[mount]), "volumes": [volume]}
        clients.create(clients.indexed("run", 1, template=spec))


@pytest.mark.parametrize(
    ("method", "path", "kind", "code", "reason"),
    [
        ("GET", "/apis/apps/v1/namespaces/ns/deployments", "application/json", 404, "NotFound"),
        ("GET", "/nonsense", "application/json", 404, "NotFound"),
        (
            "POST",
            "/apis/batch/v1/namespaces/ns/jobs",
            "application/vnd.kubernetes.protobuf",
            400,
            "BadRequest",
        ),
        (
            "POST",
            "/apis/batch/v1/namespaces/ns/jobs",
            "application/yaml",
            415,
            "UnsupportedMediaType",
        ),
        (
            "PATCH",
            "/apis/batch/v1/namespaces/ns/jobs/run",
            "application/apply-patch+yaml",
            415,
            "UnsupportedMediaType",
        ),
        (
            "POST",
            "/apis/batch/v1/namespaces/ns/jobs/run",
            "application/json",
            405,
            "MethodNotAllowed",
        ),
        (
            "GET",
            "/api/v1/namespaces/ns/pods?fieldSelector=spec.hostname=a",
            "application/json",
            400,
            "BadRequest",
        ),
        (
            "GET",
            "/api/v1/namespaces/ns/pods?labelSelector=a%3D%3D%3Db",
            "application/json",
            400,
            "BadRequest",
        ),
        (
            "GET",
            "/api/v1/namespaces/ns/pods?labelSelector=%21a",
            "application/json",
            400,
            "BadRequest",
        ),
        (
            "GET",
            "/api/v1/namespaces/ns/pods?labelSelector=a+in+(b,c)",
            "application/json",
            400,
            "BadRequest",
        ),
        (
            "GET",
            "/api/v1/namespaces/ns/pods?fieldSelector=metadata.name%21=b",
            "application/json",
            400,
            "BadRequest",
        ),
        (
            "PUT",
            "/apis/batch/v1/namespaces/ns/jobs/run",
            "application/json",
            405,
            "MethodNotAllowed",
        ),
        (
            "GET",
            "/apis/batch/v1/namespaces/ns/jobs/run/status",
            "application/json",
            404,
            "NotFound",
        ),
        ("GET", "/api/v1/namespaces/ns/pods?continue=abc", "application/json", 400, "BadRequest"),
    ],
)
def test_requests_that_no_api_serves(clients, method, path, kind, code, reason):
    clients.create(clients.indexed("run", 1))
    answer = clients.raw(method, path, b"{}" if method != "GET" else None, kind)[0]
    assert (answer["kind"], answer["code"], answer["reason"]) == ("Status", code, reason)


def test_broken_json(clients):
    assert clients.raw("POST", "/apis/batch/v1/namespaces/ns/jobs", b"{")[0]["code"] == 400


def test_wrong_token(clients):
    answer = clients.raw("GET", "/api/v1/namespaces/ns/pods", token="other")[0]
    assert (answer["code"], answer["reason"], answer["message"]) == (
        401,
        "Unauthorized",
        "Unauthorized",
    )


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_of_the_token_may_be_in_any_case(clients, scheme):
    """The Python client of a pod writes it small."""
    access = clients.stand_in.access
    access.authenticate(f"{scheme} {access.token}")
    for wrong in (access.token, f"Basic {access.token}", f"{scheme}{access.token}", scheme):
        with pytest.raises(Exception, match="Unauthorized"):
            access.authenticate(wrong)


def test_names_that_are_unknown_or_taken(clients):
    with clients.refused(404, "NotFound", 'jobs.batch "run" not found'):
        clients.job("run")
    clients.create(clients.indexed("run", 1))
    with clients.refused(409, "AlreadyExists", 'jobs.batch "run" already exists'):
        clients.create(clients.indexed("run", 1))
    with clients.refused(404, "NotFound", 'namespaces "nowhere" not found'):
        clients.batch.create_namespaced_job(namespace="nowhere", body=clients.indexed("run", 1))
    with clients.refused(404, "NotFound", 'pods "x" not found'):
        clients.log("x")
    with clients.refused(400, "BadRequest", "does not match the namespace"):
        body = clients.indexed("run", 1)
        body["metadata"]["namespace"] = "default"
        clients.create(body)


def test_preconditions(clients):
    made = clients.create(clients.indexed("run", 1))
    uid = made["metadata"]["uid"]
    with clients.refused(409, "Conflict", f"UID in precondition: other, UID in object meta: {uid}"):
        clients.delete(
            "run", body={"preconditions": {"uid": "other"}, "propagationPolicy": "Foreground"}
        )
    with clients.refused(409, "Conflict", "the object has been modified"):
        clients.patch("run", {"metadata": {"resourceVersion": "1"}})
    version = clients.job("run")["metadata"]["resourceVersion"]
    clients.patch("run", {"metadata": {"resourceVersion": version, "annotations": {"a": "b"}}})
    clients.delete("run", body={"preconditions": {"uid": uid}, "propagationPolicy": "Background"})
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")


def test_a_policy_that_is_none(clients):
    clients.create(clients.indexed("run", 1))
    with clients.refused(422, "Invalid", 'Unsupported value: "Later"'):
        clients.delete("run", propagation_policy="Later")
    with clients.refused(422, "Invalid", "orphanDependents: Forbidden"):
        clients.delete("run", body={"orphanDependents": True})


@pytest.mark.parametrize(
    "spec",
    [
        {"completions": 3},
        {"completions": None},
        {"completionMode": "NonIndexed"},
        {"backoffLimitPerIndex": 1},
        {"podFailurePolicy": {"rules": []}},
        {"template": {"spec": {"hostname": "other"}}},
        {"selector": {"matchLabels": {"a": "b"}}},
    ],
)
def test_what_cannot_change(clients, spec):
    clients.create(clients.indexed("run", 2))
    words = "field is immutable: the stand-in does not change it|in tandem"
    with clients.refused(422, "Invalid", words):
        clients.patch("run", {"spec": spec})


@pytest.mark.parametrize(
    "spec",
    [
        {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}},
        {"managedBy": "a/b"},
        {"manualSelector": True},
    ],
)
def test_fields_that_are_not_served_are_named(clients, spec):
    (field,) = spec
    with clients.refused(422, "Invalid", f"spec.{field}: Forbidden: the stand-in does not serve"):
        clients.create(clients.indexed("run", 2, **spec))


def test_collections_are_not_deleted_at_once(clients):
    answer = clients.raw("DELETE", "/api/v1/namespaces/ns/pods")[0]
    assert (answer["code"], answer["reason"]) == (405, "MethodNotAllowed")


@pytest.mark.parametrize(
    "spec", [{"activeDeadlineSeconds": 60}, {"backoffLimit": 1}, {"ttlSecondsAfterFinished": 5}]
)
def test_what_may_change(clients, spec):
    clients.create(clients.indexed("run", 2))
    assert clients.patch("run", {"spec": spec})["spec"].items() >= spec.items()


def test_a_dry_run_leaves_nothing(clients):
    planned = clients.create(clients.indexed("run", 2), dry_run="All")
    assert planned["spec"]["backoffLimit"] == 6
    assert planned["metadata"]["uid"]
    with clients.refused(404, "NotFound", "run"):
        clients.job("run")
    with clients.refused(422, "Invalid", "metadata.name"):
        clients.create(clients.indexed("My_Run", 2), dry_run="All")
    clients.create(clients.indexed("run", 2))
    with clients.refused(409, "AlreadyExists", "run"):
        clients.create(clients.indexed("run", 2), dry_run="All")


def test_pods_do_not_change(clients):
    clients.create(clients.indexed("run", 1))
    clients.world.settle()
    with clients.refused(422, "Invalid", "does not change the spec of a pod"):
        name = clients.world.pod("run", 0, "ns").name
        clients.core.patch_namespaced_pod(
            name=name, namespace="ns", body={"spec": {"hostname": "x"}}
        )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("key", "words"),
    [
        (".", "must not be '.'"),
        ("..", "must not be '..'"),
        ("..a", "must not start with '..'"),
        ("a/b", "a valid config key must consist of alphanumeric characters"),
        ("k" * 254, "must be no more than 253 characters"),
    ],
)
@pytest.mark.parametrize(("kind", "part"), [("ConfigMap", "data"), ("Secret", "stringData")])
def test_keys_that_could_not_be_names_of_files(clients, kind, part, key, words):
    things = f"/api/v1/namespaces/ns/{kind.lower()}s"
    thing = {"metadata": {"name": "a"}, part: {".k-1_": ""}}
    assert clients.raw("POST", things, thing)[0]["kind"] == kind
    merge = "application/merge-patch+json"
    for method, path, name, sent in (
        ("POST", things, "b", "application/json"),
        ("PATCH", f"{things}/a", "a", merge),
    ):
        odd = {"metadata": {"name": name}, part: {key: ""}}
        answer, _ = clients.raw(method, path, odd, sent)
        assert (answer.get("code"), answer.get("reason")) == (422, "Invalid")
        assert f'data[{key}]: Invalid value: "{key}": {words}' in answer["message"]
