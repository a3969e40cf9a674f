"""The patches, by the examples of their documents and by laws."""

from __future__ import annotations

import copy

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
    assert _patch.apply(_patch.MERGE, thing, patch) == result


@given(OBJECTS, OBJECTS)
def test_merge_is_idempotent_and_leaves_its_arguments_alone(thing, patch):
    kept = copy.deepcopy((thing, patch))
    once = _patch.apply(_patch.MERGE, thing, patch)
    assert _patch.apply(_patch.MERGE, once, patch) == once
    assert (thing, patch) == kept


@pytest.mark.parametrize(
    ("thing", "operations", "result"),
    [
        ({"a": 1}, [{"op": "add", "path": "/b", "value": 2}], {"a": 1, "b": 2}),
        ({"a": [1, 3]}, [{"op": "add", "path": "/a/1", "value": 2}], {"a": [1, 2, 3]}),
        ({"a": [1]}, [{"op": "add", "path": "/a/-", "value": 2}], {"a": [1, 2]}),
        ({"a": 1, "b": 2}, [{"op": "remove", "path": "/a"}], {"b": 2}),
        ({"a": [1, 2]}, [{"op": "remove", "path": "/a/0"}], {"a": [2]}),
        ({"a": 1}, [{"op": "replace", "path": "/a", "value": 2}], {"a": 2}),
        ({"a": {"b": 1}}, [{"op": "move", "from": "/a/b", "path": "/c"}], {"a": {}, "c": 1}),
        (
            {"a": {"b": 1}},
            [{"op": "copy", "from": "/a", "path": "/c"}],
            {"a": {"b": 1}, "c": {"b": 1}},
        ),
        (
            {"a/b": 1, "m~n": 2},
            [{"op": "remove", "path": "/a~1b"}, {"op": "test", "path": "/m~0n", "value": 2}],
            {"m~n": 2},
        ),
    ],
)
def test_json_patch(thing, operations, result):
    kept = copy.deepcopy(thing)
    assert _patch.apply(_patch.JSON, thing, operations) == result
    assert thing == kept


@pytest.mark.parametrize(
    "operations",
    [
        [{"op": "test", "path": "/a", "value": 2}],
        [{"op": "remove", "path": "/b"}],
        [{"op": "replace", "path": "/b", "value": 1}],
        [{"op": "jump", "path": "/a"}],
        [{"path": "/a"}],
    ],
)
def test_json_patches_that_fail(operations):
    with pytest.raises(ApiError) as caught:
        _patch.apply(_patch.JSON, {"a": 1}, operations)
    assert caught.value.code == 422


CONTAINERS = {
    "containers": [
        {"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]},
        {"name": "b", "image": "2"},
    ]
}


@pytest.mark.parametrize(
    ("patch", "result"),
    [
        (
            {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}]},
            [
                {
                    "name": "a",
                    "image": "1",
                    "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}],
                },
                {"name": "b", "image": "2"},
            ],
        ),
        ({"containers": [{"name": "a", "$patch": "delete"}]}, [{"name": "b", "image": "2"}]),
        ({"containers": [{"$patch": "replace"}, {"name": "c"}]}, [{"name": "c"}]),
        (
            {
                "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
                "containers": [{"name": "b", "image": "3"}],
            },
            [{"name": "b", "image": "3"}, CONTAINERS["containers"][0]],
        ),
        ({"containers": None}, None),
    ],
)
def test_strategic_merge_knows_the_lists(patch, result):
    kept = copy.deepcopy(CONTAINERS)
    assert _patch.apply(_patch.STRATEGIC, CONTAINERS, patch).get("containers") == result
    assert kept == CONTAINERS


def test_strategic_merge_of_other_lists_and_maps():
    thing = {"args": ["a", "b"], "labels": {"x": "1", "y": "2"}, "finalizers": ["one"]}
    patch = {"args": ["c"], "labels": {"x": None, "z": "3"}, "finalizers": ["two"]}
    assert _patch.apply(_patch.STRATEGIC, thing, patch) == {
        "args": ["c"],
        "labels": {"y": "2", "z": "3"},
        "finalizers": ["one", "two"],
    }
    assert _patch.apply(
        _patch.STRATEGIC, {"a": ["x", "y"]}, {"$deleteFromPrimitiveList/a": ["x"]}
    ) == {"a": ["y"]}
    assert _patch.apply(
        _patch.STRATEGIC, {"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 2}}
    ) == {"a": {"c": 2}}


@pytest.mark.parametrize("kind", ["", "text/plain", _patch.APPLY])
def test_unknown_patches(kind):
    with pytest.raises(ApiError) as caught:
        _patch.apply(kind, {}, {})
    assert caught.value.code == 415


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": ""},
        {"op": "replace", "path": "", "value": 5},
        {"op": "add", "path": 5, "value": 1},
        {"op": "add", "path": "/a/99999999999999999999", "value": 1},
    ],
)
def test_operations_that_cannot_be_done(operation):
    with pytest.raises(ApiError) as caught:
        _patch.apply(_patch.JSON, {"a": [1]}, [operation])
    assert caught.value.code == 422
