"""Numbers in strangers' words: each is understood, or refused as the API server refuses it."""

from __future__ import annotations

import json

import pytest

from diloco_localcloud import KubernetesStandIn
from diloco_localcloud._server._http import Request

LONG = "9" * 5000
PODS = "/api/v1/namespaces/default/pods"
LOG = f"{PODS}/one/log"


@pytest.fixture(scope="module")
def stand_in():
    made = KubernetesStandIn(tls=False)
    spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "any"}]}
    pod = {"metadata": {"name": "one"}, "spec": spec}
    assert ask(made, "POST", PODS, body=pod)[0] == 201
    made.world.settle()
    made.world.pods()[0].start()
    return made


def ask(stand_in, method, path, query=None, body=None):
    text = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {stand_in.token}", "content-type": "application/json"}
    answer = stand_in._api.handle(Request(method, path, query or {}, headers, text))
    return answer.status, json.loads(answer.body) if answer.kind == "application/json" else None


@pytest.mark.parametrize(
    "value", [LONG, "-" + LONG, "\u00b2", "x", "1.5", "1e999", "nan", "+", "1_0"]
)
@pytest.mark.parametrize(
    ("path", "query"),
    [
        (PODS, "limit"),
        (PODS, "timeoutSeconds"),
        (PODS, "resourceVersion"),
        (LOG, "tailLines"),
        (LOG, "sinceSeconds"),
        (LOG, "limitBytes"),
    ],
)
def test_a_parameter_that_is_no_number(stand_in, path, query, value):
    watch = {"watch": "true"} if query in ("timeoutSeconds", "resourceVersion") else {}
    status, answer = ask(stand_in, "GET", path, {**watch, query: value})
    assert (status, answer["reason"]) == (400, "BadRequest")
    digits = value.lstrip("-").isascii() and value.lstrip("-").isdigit()
    if query != "resourceVersion":
        assert answer["message"].endswith("value out of range" if digits else "invalid syntax")


@pytest.mark.parametrize("value", ["3", "+3", "0", str(2**63 - 1)])
def test_a_parameter_that_is_a_number(stand_in, value):
    assert ask(stand_in, "GET", PODS, {"limit": value})[0] == 200
    assert ask(stand_in, "GET", LOG, {"sinceSeconds": value, "tailLines": value})[0] == 200


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ({"gracePeriodSeconds": LONG}, None),
        ({"gracePeriodSeconds": "x"}, None),
        ({}, {"gracePeriodSeconds": "3"}),
        ({}, {"gracePeriodSeconds": [3]}),
        ({}, {"gracePeriodSeconds": 2**70}),
        ({}, {"preconditions": "x"}),
        ({}, {"propagationPolicy": {}}),
        ({}, ["x"]),
        ({}, b'{"gracePeriodSeconds": ' + LONG.encode() + b"}"),
    ],
)
def test_options_of_a_delete(stand_in, query, body):
    status, answer = ask(stand_in, "DELETE", f"{PODS}/one", query, body)
    assert (status, answer["reason"]) == (400, "BadRequest")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900])
def test_a_body_that_is_too_deep(stand_in, text):
    status, answer = ask(stand_in, "POST", PODS, body=text)
    assert (status, answer["reason"]) == (400, "BadRequest")


def test_times_are_never_too_far(stand_in):
    pod = {
        "metadata": {
            "name": "patient",
            "annotations": {"batch.kubernetes.io/job-completion-index": LONG},
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2**62,
            "containers": [{"name": "main", "image": "any"}],
        },
    }
    assert ask(stand_in, "POST", PODS, body=pod)[0] == 201
    stand_in.world.settle()
    assert [each.index for each in stand_in.world.pods() if each.name == "patient"] == [None]
    status, told = ask(stand_in, "DELETE", f"{PODS}/patient")
    assert (status, told["metadata"]["deletionTimestamp"]) == (200, "9999-12-31T23:59:59Z")


@pytest.mark.parametrize("amount", ["1e999", LONG, "1e" + LONG])
def test_quantities_without_bounds(stand_in, amount):
    resources = {"limits": {"nvidia.com/gpu": amount}}
    pod = {
        "metadata": {"name": "vast"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "any", "resources": resources}],
        },
    }
    assert ask(stand_in, "POST", PODS, body=pod)[0] in (400, 422)
