"""The patches, by the examples of their documents and by laws."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_localcloud._kubernetes._api import _patch
from diloco_localcloud._kubernetes._objects._refusals import ApiError

LEAVES = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "b"])
THINGS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), THINGS, max_size=3)


def applied(kind, thing, patch):
    return _patch.apply(kind, thing, json.dumps(patch).encode())


@pytest.mark.parametrize(
    ("thing", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_by_the_examples_of_rfc_7396(thing, patch, result):
    assert applied(_patch.MERGE, thing, patch) == result


@given(OBJECTS, OBJECTS)
def test_merge_is_idempotent_and_leaves_its_arguments_alone(thing, patch):
    kept = copy.deepcopy((thing, patch))
    once = applied(_patch.MERGE, thing, patch)
    assert applied(_patch.MERGE, once, patch) == once
    assert (thing, patch) == kept


def test_strategic_merge_of_other_lists_and_maps():
    thing = {"args": ["a", "b"], "labels": {"x": "1", "y": "2"}}
    patch = {"args": ["c"], "labels": {"x": None, "z": "3"}}
    assert applied(_patch.STRATEGIC, thing, patch) == {
        "args": ["c"],
        "labels": {"y": "2", "z": "3"},
    }


@pytest.mark.parametrize(
    "patch",
    [
        {"$patch": "replace"},
        {"a": {"$retainKeys": ["b"]}},
        {"a": {"$patch": "delete"}},
        {"spec": {"containers": [{"name": "a", "image": "2"}]}},
        {"containers": [{"name": "c", "$patch": "replace"}]},
        {"$deleteFromPrimitiveList/finalizers": ["x"]},
        {"metadata": {"finalizers": ["x"]}},
    ],
)
def test_what_a_strategic_merge_does_not_serve_is_named(patch):
    with pytest.raises(ApiError, match=r"does not serve (\$|containers|finalizers)") as caught:
        applied(_patch.STRATEGIC, {"containers": [{"name": "a"}]}, patch)
    assert caught.value.code == 400


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/apply-patch+yaml", "application/json-patch+json"]
)
def test_unknown_patches(kind):
    with pytest.raises(ApiError) as caught:
        applied(kind, {}, {})
    assert caught.value.code == 415
