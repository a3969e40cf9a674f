"""Handles, specs and outcomes come back exactly as they went in, through every channel, or are refused by name."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import (
    InvalidRequestError,
    Outcome,
    Reason,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaState,
    SpecVersionError,
    environment,
    spec_from_arguments,
    spec_from_environment,
    spec_to_arguments,
    spec_to_environment,
)
from diloco_protocol._json import check_json

text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
kwargs = st.dictionaries(text, json_values, max_size=4)
specs = st.builds(
    ReplicaSpec,
    entrypoint=st.just("package.module:function"),
    kwargs=kwargs,
    rank=st.integers(0, 99),
    world_size=st.integers(100, 200),
    attempt=st.integers(1, 9),
    run_id=text,
    rendezvous_uri=st.none() | text,
    timeout=st.none() | st.floats(0.1, 1e6),
    grace=st.floats(0.0, 60.0),
)
handles = st.builds(
    ReplicaHandle,
    st.integers(0, 99),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.dictionaries(text, text, max_size=4),
    run_id=text,
    world_size=st.integers(1, 200),
)


def exactly(a, b):
    """Equal, and of the same types all the way down (1 is not 1.0 and not True)."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


class TestSpec:
    @given(specs)
    def test_json(self, spec):
        again = ReplicaSpec.from_json(spec.to_json())
        assert again == spec
        assert exactly(again.kwargs, spec.kwargs)

    @given(specs, st.integers(1, 500))
    def test_environment(self, spec, piece):
        variables = spec_to_environment(spec, piece_bytes=piece)
        assert all(len(value) <= piece and value.isascii() for value in variables.values())
        assert not any(character in value for value in variables.values() for character in "$`\"'\\ \n")
        again = spec_from_environment({**variables, "PATH": "/bin"})
        assert again == spec
        assert exactly(again.kwargs, spec.kwargs)

    @given(specs, st.randoms())
    def test_arguments_in_any_order(self, spec, random):
        arguments = spec_to_arguments(spec)
        assert all(len(argument) <= 256 for argument in arguments)
        random.shuffle(arguments)
        assert spec_from_arguments(["--other", *arguments]) == spec

    def test_a_large_spec_fits_into_environment_strings(self):
        spec = ReplicaSpec("m:f", {"a": "x" * 10**6}, 0, 1)
        variables = spec_to_environment(spec)
        assert max(len(name) + len(value) + 2 for name, value in variables.items()) < 128 * 1024
        assert spec_from_environment(variables) == spec

    def test_what_is_missing_is_named(self):
        spec = ReplicaSpec("m:f", {"a": "x" * 100}, 0, 1)
        with pytest.raises(InvalidRequestError, match="no replica spec"):
            spec_from_environment({})
        variables = spec_to_environment(spec, piece_bytes=50)
        del variables["DILOCO_SPEC_1"]
        with pytest.raises(InvalidRequestError, match="lacks DILOCO_SPEC_1"):
            spec_from_environment(variables)
        with pytest.raises(InvalidRequestError, match="incomplete"):
            spec_from_arguments(spec_to_arguments(spec)[1:])
        with pytest.raises(InvalidRequestError, match="incomplete"):
            spec_from_arguments([])
        with pytest.raises(InvalidRequestError, match="damaged"):
            spec_from_environment({"DILOCO_SPEC_0": "not base64!"})

    def test_another_version_is_refused_by_name(self):
        later = ReplicaSpec("m:f", {}, 0, 1).to_json().replace('"version":1', '"version":7')
        with pytest.raises(SpecVersionError, match=r"version 7, but its diloco-protocol reads version 1"):
            ReplicaSpec.from_json(later)

    @pytest.mark.parametrize("data", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 1, "extra": 2}'])
    def test_what_is_no_spec_is_refused(self, data):
        with pytest.raises(InvalidRequestError):
            ReplicaSpec.from_json(data)

    def test_the_environment_of_a_replica(self):
        spec = ReplicaSpec("m:f", {}, 3, 8, attempt=2, run_id="a", rendezvous_uri="s3://b/c", rank_env="MY_RANK")
        assert environment(spec) == {
            "MY_RANK": "3",
            "REPLICA_RANK": "3",
            "WORLD_SIZE": "8",
            "DILOCO_RUN_ID": "a",
            "DILOCO_ATTEMPT": "2",
            "RENDEZVOUS_URI": "s3://b/c",
        }
        assert "RENDEZVOUS_URI" not in environment(replace(spec, rendezvous_uri=None))


class TestHandle:
    @given(handles)
    def test_json(self, handle):
        again = ReplicaHandle.from_json(handle.to_json())
        assert again == handle
        assert hash(again) == hash(handle)
        assert again.metadata == handle.metadata

    def test_it_is_immutable(self):
        handle = ReplicaHandle(0, "b", {"job": "x"})
        with pytest.raises(AttributeError):
            handle.rank = 1
        with pytest.raises(TypeError):
            handle.metadata["job"] = "y"

    def test_positional_names_of_old(self):
        handle = ReplicaHandle(rank=2, backend_name="eks", metadata={"job_name": "j"})
        assert (handle.rank, handle.backend_name, handle.metadata["job_name"]) == (2, "eks", "j")
        assert ReplicaHandle(2, "eks").metadata == {}

    def test_handles_of_two_runs_differ(self):
        assert ReplicaHandle(0, "b", run_id="a") != ReplicaHandle(0, "b", run_id="c")

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ((-1, "b"), "rank"),
            (("0", "b"), "rank"),
            ((True, "b"), "rank"),
            ((0, ""), "backend_name"),
            ((0, "b", {"a": 1}), "text to text"),
        ],
    )
    def test_what_is_impossible_is_refused(self, arguments, told):
        with pytest.raises(InvalidRequestError, match=told):
            ReplicaHandle(*arguments)

    def test_world_size(self):
        with pytest.raises(InvalidRequestError, match="world_size"):
            ReplicaHandle(0, "b", world_size=0)

    def test_another_version_is_refused(self):
        data = {**ReplicaHandle(0, "b").to_dict(), "version": 2}
        with pytest.raises(SpecVersionError, match="version 2"):
            ReplicaHandle.from_dict(data)

    @pytest.mark.parametrize("data", ["", "[]", "{}", '{"version": 1}'])
    def test_what_is_no_handle_is_refused(self, data):
        with pytest.raises(InvalidRequestError):
            ReplicaHandle.from_json(data)


class TestOutcome:
    @given(json_values, st.sampled_from(Reason), st.none() | text)
    def test_json(self, result, reason, error):
        outcome = Outcome(3, signal="SIGKILL", error=error, result=result, reason=reason, started_at=1.5)
        again = Outcome.from_json(outcome.to_json())
        assert again == outcome
        assert again.reason is reason
        assert exactly(again.result, result)

    @pytest.mark.parametrize("data", ["", "[]", "{}", '{"version": 9}', '{"version": 1}'])
    def test_what_is_no_outcome_is_refused(self, data):
        with pytest.raises((InvalidRequestError, SpecVersionError)):
            Outcome.from_json(data)


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
            ({"a": "\ud800"}, "lone surrogate"),
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
