"""What the supervisor is told arrives as it was ordered."""

import json

import pytest

from diloco_local._orders import Order
from diloco_protocol import InvalidRequestError, ReplicaSpec, SpecVersionError

SPEC = ReplicaSpec(
    "trainer:train", {"deep": [{"a": None}], "text": "\u2026"}, rank=3, world_size=5, timeout=2.5
)
ORDER = Order(SPEC, ("python", "-m", "runner"), {"A": "1"}, "/work")


def test_it_comes_back_through_the_pipe():
    back = Order.from_dict(json.loads(json.dumps(ORDER.to_dict())))
    assert back == ORDER
    assert type(back.spec) is ReplicaSpec
    assert back.rank == 3


def test_the_arguments_are_not_copied_on_the_way_to_the_pipe():
    assert ORDER.to_dict()["spec"]["kwargs"] is SPEC.kwargs


@pytest.mark.parametrize(
    ("change", "error"), [({"version": 99}, SpecVersionError), ({"rank": 5}, InvalidRequestError)]
)
def test_a_spec_that_is_wrong_is_refused(change, error):
    data = ORDER.to_dict()
    data["spec"] |= change
    with pytest.raises(error):
        Order.from_dict(data)
