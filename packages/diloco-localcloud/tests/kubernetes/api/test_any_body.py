"""Whatever is sent, the server answers as a server: it never breaks."""

from __future__ import annotations

import copy
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_localcloud import KubernetesStandIn, Node
from diloco_localcloud._server._http import Request

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "1Gi", "Never"])
)
THINGS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["name", "a"]), inner, max_size=2),
)

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
TERM = {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
RULE = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
MAIN = {
    "name": "main",
    "image": "any",
    "command": ["a"],
    "env": [
        {"name": "A", "value": "b"},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ],
    "envFrom": [{"configMapRef": {"name": "c"}}],
    "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}},
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "securityContext": {"privileged": False, "capabilities": {"drop": ["ALL"]}},
}
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "run", "labels": {"a": "b"}, "annotations": {"c": "d"}},
    "spec": {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": 1,
        "maxFailedIndexes": 1,
        "podFailurePolicy": {"rules": [RULE]},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "restartPolicy": "Never",
                "priorityClassName": "system-node-critical",
                "securityContext": {"runAsUser": 1, "seccompProfile": {"type": "RuntimeDefault"}},
                "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [TERM]}}},
                "tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 1}],
                "containers": [MAIN],
                "volumes": [
                    {"name": "v", "emptyDir": {}},
                    {"name": "x", "persistentVolumeClaim": {"claimName": "c"}},
                    {"name": "w", "configMap": {"name": "c", "items": [{"key": "k", "path": "p"}]}},
                ],
            },
        },
    },
}


def places(thing, path=()):
    yield path
    items = (
        thing.items()
        if isinstance(thing, dict)
        else enumerate(thing)
        if isinstance(thing, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


def put(thing, path, value):
    if not path:
        return value
    new = copy.deepcopy(thing)
    place = new
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return new


JOBS = "/apis/batch/v1/namespaces/default/jobs"
PLACES = sorted(places(JOB), key=str)


def ask(stand_in, method, path, body, kind="application/json"):
    headers = {"authorization": f"Bearer {stand_in.token}", "content-type": kind}
    answer = stand_in._api.handle(Request(method, path, {}, headers, json.dumps(body).encode()))
    return answer.status, json.loads(answer.body)


POD = ("spec", "template", "spec")
CONTAINER = (*POD, "containers", 0)
TERMS = (*POD, "affinity", "nodeAffinity", REQUIRED, "nodeSelectorTerms")


@pytest.mark.parametrize(
    "path",
    [
        *((*POD, "tolerations", *rest) for rest in ((), (0,), (0, "tolerationSeconds"))),
        *(TERMS[:end] for end in (4, 5, 6, 7)),
        *((*TERMS, *rest) for rest in ((0,), (0, "matchExpressions"))),
        *((*TERMS, 0, "matchExpressions", 0, *rest) for rest in ((), ("key",), ("values",))),
        (*POD, "priorityClassName"),
        (*POD, "runtimeClassName"),
        *((*POD, "volumes", 1, "persistentVolumeClaim", *rest) for rest in ((), ("claimName",))),
        (*POD, "securityContext"),
        (*POD, "securityContext", "seccompProfile"),
        (*CONTAINER, "securityContext"),
        *((*CONTAINER, "securityContext", "capabilities", *rest) for rest in ((), ("drop",))),
    ],
)
@pytest.mark.parametrize("value", [True, [5]])
def test_fields_of_another_type_are_refused(path, value):
    stand_in = KubernetesStandIn(tls=False)
    status, answer = ask(stand_in, "POST", JOBS, put(JOB, path, value))
    assert (status, answer["reason"]) == (400, "BadRequest")
    assert "json: cannot unmarshal" in answer["message"]


@pytest.mark.parametrize("path", [(*TERMS[:-1],), (*TERMS, 0, "matchExpressions", 0)])
def test_an_affinity_without_its_parts_chooses_no_node(path):
    stand_in = KubernetesStandIn(tls=False, nodes=[Node("one")])
    body = put(put(JOB, (*POD, "volumes", 1), {"name": "x"}), path, {"other": 5})
    assert ask(stand_in, "POST", JOBS, body)[0] == 201
    stand_in.world.settle()
    for pod in stand_in.world.pods("run"):
        (condition,) = pod.json["status"]["conditions"]
        assert "didn't match Pod's node affinity" in condition["message"]


@pytest.mark.parametrize("path", [JOBS, f"{JOBS}/run"])
def test_owners_are_named_in_full(path):
    stand_in = KubernetesStandIn(tls=False)
    body = put(JOB, ("metadata", "ownerReferences"), [{}])
    if path != JOBS:
        assert ask(stand_in, "POST", JOBS, JOB)[0] == 201
    how = ("POST",) if path == JOBS else ("PATCH", "application/merge-patch+json")
    status, answer = ask(stand_in, how[0], path, body, *how[1:])
    assert status == 422, answer
    for part in ("apiVersion", "kind", "name", "uid"):
        assert f'metadata.ownerReferences.{part}: Invalid value: "": ' in answer["message"]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), THINGS)
def test_a_job_with_anything_anywhere(path, value):
    stand_in = KubernetesStandIn(tls=False)
    jobs = "/apis/batch/v1/namespaces/default/jobs"
    status, answer = ask(stand_in, "POST", jobs, put(JOB, path, value))
    assert status in (201, 400, 422), answer
    if status == 201:
        stand_in.world.settle()  # what was accepted, the controller can work with
        assert ask(stand_in, "GET", f"{jobs}/{answer['metadata']['name']}", None)[0] == 200
    else:
        assert answer["message"]


@pytest.mark.parametrize("per_index", [True, False])
def test_a_job_of_very_many_completions_takes_no_memory(per_index):
    body = put(JOB, ("spec", "completions"), 2**31 - 1)
    if not per_index:
        body["spec"] = {
            k: v
            for k, v in body["spec"].items()
            if k not in ("backoffLimitPerIndex", "maxFailedIndexes")
        }
    stand_in = KubernetesStandIn(tls=False)
    status, answer = ask(stand_in, "POST", "/apis/batch/v1/namespaces/default/jobs", body)
    assert status == 201, answer
    tracemalloc.start()
    try:
        stand_in.world.settle()
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    pods = ask(stand_in, "GET", "/api/v1/namespaces/default/pods", None)[1]["items"]
    assert len(pods) == 2


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([path for path in PLACES if path]), THINGS)
def test_a_patch_with_anything_anywhere(path, value):
    stand_in = KubernetesStandIn(tls=False)
    job = "/apis/batch/v1/namespaces/default/jobs/run"
    assert ask(stand_in, "POST", job.rpartition("/")[0], JOB)[0] == 201
    stand_in.world.settle()
    for kind in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
        status, answer = ask(stand_in, "PATCH", job, put(JOB, path, value), kind)
        assert status in (200, 400, 404, 409, 422), answer
    stand_in.world.settle()
