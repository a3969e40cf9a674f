"""The fields that are no fields."""

from __future__ import annotations

import pytest

from diloco_localcloud._kubernetes._api._checks import _shape
from diloco_localcloud._kubernetes._objects._refusals import ApiError


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"sepc": {}}, "sepc"),
        ({"spec": {"comletions": 2}}, "spec.comletions"),
        ({"spec": {"template": {"status": {}}}}, "spec.template.status"),
        ({"spec": {"template": {"spec": {"nodes": 1}}}}, "spec.template.spec.nodes"),
        (
            {"spec": {"template": {"spec": {"containers": [{}, {"kommand": []}]}}}},
            "spec.template.spec.containers[1].kommand",
        ),
    ],
)
def test_unknown_fields_are_refused_by_name(job, field):
    with pytest.raises(ApiError) as caught:
        _shape.decode("Job", job)
    assert str(caught.value).endswith(f'strict decoding error: unknown field "{field}"')
    assert caught.value.code == 400


def test_fields_that_are_not_read_may_be_sent(clients):
    made = clients.create(clients.indexed("run", 1, scheduling={"a": 1}))
    assert made["spec"]["completions"] == 1
