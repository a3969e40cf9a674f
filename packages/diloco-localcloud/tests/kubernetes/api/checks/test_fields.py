"""The fields that are no fields."""

from __future__ import annotations

import pytest

from diloco_localcloud._kubernetes._api._checks import _fields
from diloco_localcloud._kubernetes._objects._refusals import ApiError

JOB = {
    "kind": "Job",
    "spec": {
        "comletions": 2,
        "template": {"spec": {"containers": [{"name": "a", "kommand": []}], "nodes": 1}},
    },
}


def test_unknown_fields():
    kept, warnings = _fields.known("Job", JOB, "Warn")
    assert kept == {"kind": "Job", "spec": {"template": {"spec": {"containers": [{"name": "a"}]}}}}
    names = [
        "spec.comletions",
        "spec.template.spec.nodes",
        "spec.template.spec.containers[0].kommand",
    ]
    assert warnings == [f'unknown field "{name}"' for name in names]
    assert _fields.known("Job", JOB, "Ignore") == (kept, [])
    with pytest.raises(ApiError, match=r'strict decoding error: unknown field "spec.comletions"'):
        _fields.known("Job", JOB, "Strict")


def test_unknown_fields_are_told_in_a_header(clients):
    jobs, body = "/apis/batch/v1/namespaces/ns/jobs", clients.indexed("run", 1, unknownThing=1)
    made, headers = clients.raw("POST", jobs, body)
    assert "unknownThing" not in made["spec"]
    assert headers["Warning"] == r'299 - "unknown field \"spec.unknownThing\""'
    refused, _ = clients.raw("POST", f"{jobs}?fieldValidation=Strict", body)
    assert (refused["code"], refused["reason"]) == (400, "BadRequest")
    assert "strict decoding error" in refused["message"]
