"""What JSON carries is passed; what it cannot is named by its path."""

import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import json_values, text

from diloco_protocol import (
    InvalidRequestError,
    Outcome,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaState,
    outcome_from_message,
)
from diloco_protocol._json import canonical, check_json, dumps, loads


class TestJson:
    @given(json_values)
    def test_json_is_accepted(self, value):
        check_json(value, "kwargs")

    @pytest.mark.parametrize(
        ("value", "told"),
        [
            ({"a": [1, {"b": float("nan")}]}, r"kwargs\.a\[1\]\.b is nan"),
            ({"a": float("inf")}, r"kwargs\.a is inf"),
            ({"a": (1, 2)}, r"kwargs\.a is a builtins\.tuple.*pass a list"),
            ({"a": {1: 2}}, r"kwargs\.a has the key 1 of type int"),
            ({"a": b"x"}, r"kwargs\.a is a builtins\.bytes"),
            ({"a": {1, 2}}, "pass a list"),
            ([object()], r"kwargs\[0\] is a builtins\.object"),
            ({"a": "\ud800"}, "half of a surrogate pair"),
            ({"a": ReplicaState.FAILED}, r"kwargs\.a is a diloco_protocol\._types\.ReplicaState"),
        ],
    )
    def test_what_json_cannot_carry_is_named_by_its_path(self, value, told):
        with pytest.raises(InvalidRequestError, match=told):
            check_json(value, "kwargs")

    def test_what_contains_itself(self):
        loop = {"a": []}
        loop["a"].append(loop)
        with pytest.raises(InvalidRequestError, match="contains itself"):
            check_json(loop, "kwargs")

    def test_the_same_object_twice_is_fine(self):
        shared = [1]
        check_json({"a": shared, "b": [shared, shared]}, "kwargs")

    def test_what_is_too_deep(self):
        deep = []
        for _ in range(300):
            deep = [deep]
        with pytest.raises(InvalidRequestError, match="nested more than 200 levels"):
            check_json(deep, "kwargs")

    @given(st.integers(1, 200))
    def test_what_is_deep_comes_back(self, levels):
        deep = []
        for _ in range(levels - 1):
            deep = {"a": [deep]} if levels <= 100 else [deep]
        check_json(deep, "kwargs")
        assert loads(dumps(deep), "it") == deep

    def test_the_path_to_a_value_costs_nothing_and_is_cut(self):
        key, deep = "k" * 10_000, [[]] * 1000
        for _ in range(100):
            deep = {key: deep}
        odd = {**deep, "odd": {key: float("nan")}}
        tracemalloc.start()
        try:
            check_json(deep, "result")
            with pytest.raises(InvalidRequestError, match=r"^result\.odd\.k+… is nan") as caught:
                check_json(odd, "result")
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()
        assert len(str(caught.value)) < 500

    def test_a_secret_in_the_path_is_not_cut_to_what_no_longer_looks_like_one(self):
        with pytest.raises(InvalidRequestError) as caught:
            check_json({f"postgres://admin:{'hunter2' * 50}@db/x": object()}, "kwargs")
        assert "hunter2" not in str(caught.value)

    def test_integers_that_no_parser_takes(self):
        check_json(10**4000, "kwargs")
        assert loads(dumps(10**4000), "it") == 10**4000
        with pytest.raises(
            InvalidRequestError, match=r"kwargs\.n is an integer of 16610 bits, .* pass it as text"
        ):
            check_json({"n": 10**5000}, "kwargs")

    def test_integers_that_this_python_does_not_write(self):
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(640)
        try:
            with pytest.raises(InvalidRequestError, match="Python reads at most 2125 from JSON"):
                check_json({"n": 10**4000}, "kwargs")
            check_json(largest := 2**2125 - 1, "kwargs")
            assert loads(dumps(largest), "it") == largest
        finally:
            sys.set_int_max_str_digits(limit)

    @given(st.dictionaries(text, json_values, max_size=4))
    def test_the_order_of_keys(self, value):
        assert list(loads(dumps(value), "it")) == list(value), "kept"
        assert canonical(dict(reversed(value.items()))) == canonical(value), "left out"

    @pytest.mark.parametrize(
        "text", ["", "{", "[NaN]", '{"a": Infinity}', "-Infinity", "[1] 2", "[" * 100_000]
    )
    def test_what_is_not_json_is_not_read(self, text):
        with pytest.raises(InvalidRequestError, match="the answer is not JSON"):
            loads(text, "the answer")


@pytest.mark.parametrize("value", [None, 5, [], object()])
@pytest.mark.parametrize(
    "read",
    [ReplicaHandle.from_json, Outcome.from_json, ReplicaSpec.from_json, outcome_from_message],
    ids=["handle", "outcome", "spec", "message"],
)
def test_what_is_no_text_is_refused(read, value):
    with pytest.raises(InvalidRequestError, match="must be JSON in text"):
        read(value)
