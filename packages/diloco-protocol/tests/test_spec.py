"""A spec comes back exactly as it went in, through every channel, or is refused by name."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import json_values, text

from diloco_protocol import (
    InvalidRequestError,
    ReplicaSpec,
    SpecVersionError,
    environment,
    spec_from_arguments,
    spec_from_environment,
    spec_to_arguments,
    spec_to_environment,
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
    cohort=text,
    rendezvous_uri=st.none() | text,
    timeout=st.none() | st.floats(0.1, 1e6),
    grace=st.floats(0.0, 60.0),
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
        assert not any(
            character in value for value in variables.values() for character in "$`\"'\\ \n"
        )
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

    @pytest.mark.parametrize("place", ["9" * 5000 + "/1", "0/" + "9" * 5000, "٣/4", "0/0", "-1/2"])
    def test_numbers_of_pieces_are_somebody_elses_text(self, place):
        with pytest.raises(InvalidRequestError, match="must be a whole number from"):
            spec_from_arguments([f"--spec-piece={place}:eA=="])

    def test_another_version_is_refused_by_name(self):
        earlier = ReplicaSpec("m:f", {}, 0, 1).to_json().replace('"version":4', '"version":3')
        with pytest.raises(SpecVersionError, match=r"version 3, .* reads version 4: install the"):
            ReplicaSpec.from_json(earlier)

    def test_one_that_does_not_say_whether_replicas_are_started_again(self):
        assert "DILOCO_RESTARTS" not in environment(ReplicaSpec("m:f", {"a": 1}, 0, 2))

    def test_one_that_does_not_say_where_it_runs(self):
        spec = ReplicaSpec("m:f", {}, 0, 2, restarts=False, backend="toy", place="here")
        assert ReplicaSpec.from_json(spec.to_json()) == spec
        told = environment(spec)
        assert (told["DILOCO_BACKEND"], told["DILOCO_PLACE"]) == ("toy", "here")
        unsaid = environment(replace(spec, backend="", place=""))
        assert not unsaid.keys() & {"DILOCO_BACKEND", "DILOCO_PLACE"}
        with pytest.raises(InvalidRequestError, match="place must be text"):
            replace(spec, place=None)

    def test_whether_replicas_are_started_again_is_yes_or_no(self):
        spec = ReplicaSpec("m:f", {}, 0, 1)
        for restarts, said in ((True, "1"), (False, "0")):
            told = replace(spec, restarts=restarts)
            assert ReplicaSpec.from_json(told.to_json()) == told
            assert environment(told)["DILOCO_RESTARTS"] == said
        with pytest.raises(InvalidRequestError, match="restarts must be True, False or None"):
            replace(spec, restarts=0)

    @pytest.mark.parametrize(
        "data",
        ["", "{", "[]", "{}", '{"version": 4}', '{"version": 2}', '{"version": 4, "extra": 2}'],
    )
    def test_what_is_no_spec_is_refused(self, data):
        with pytest.raises((InvalidRequestError, SpecVersionError)):
            ReplicaSpec.from_json(data)

    def test_the_environment_of_a_replica(self):
        spec = ReplicaSpec(
            "m:f", {}, 3, 8, attempt=2, run_id="a", rendezvous_uri="s3://b/c", rank_env="MY_RANK"
        )
        assert environment(spec) == {
            "MY_RANK": "3",
            "REPLICA_RANK": "3",
            "REPLICA_WORLD_SIZE": "8",
            "DILOCO_RUN_ID": "a",
            "DILOCO_COHORT": "a",
            "DILOCO_ATTEMPT": "2",
            "RENDEZVOUS_URI": "s3://b/c",
        }
        assert "RENDEZVOUS_URI" not in environment(replace(spec, rendezvous_uri=None))
        assert environment(replace(spec, cohort="b"))["DILOCO_COHORT"] == "b"
        assert environment(replace(spec, world_size_env="WORLD_SIZE"))["WORLD_SIZE"] == "8"

    @pytest.mark.parametrize(
        ("kwargs", "told"),
        [
            (
                {"model": {"layers": [1, 2, (3,)]}},
                r"kwargs\.model\.layers\[2\] is a builtins\.tuple",
            ),
            ({"lr": float("nan")}, r"kwargs\.lr is nan"),
            ({"table": {1: "a"}}, r"kwargs\.table has the key 1 of type int"),
        ],
    )
    @pytest.mark.parametrize(
        "channel", [ReplicaSpec.to_json, spec_to_environment, spec_to_arguments]
    )
    def test_no_channel_bends_what_it_cannot_carry(self, channel, kwargs, told):
        spec = ReplicaSpec("m:f", kwargs, 0, 1)
        with pytest.raises(InvalidRequestError, match=told):
            channel(spec)

    def test_a_dict_is_the_same_without_the_text(self):
        spec = ReplicaSpec("m:f", {"a": [1, {"b": None}]}, rank=0, world_size=1)
        data = spec.to_dict()
        assert json.loads(spec.to_json()) == data
        assert ReplicaSpec.from_dict(data) == spec
        with pytest.raises(SpecVersionError, match="this replica spec has version None"):
            ReplicaSpec.from_dict([data])
        with pytest.raises(InvalidRequestError, match=r"kwargs\.a is a builtins\.object"):
            ReplicaSpec("m:f", {"a": object()}, rank=0, world_size=1).to_dict()

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"rank": -1}, "rank must be a whole number from 0"),
            ({"rank": "0"}, "rank must be a whole number"),
            ({"rank": 2}, "rank must be below its world_size of 2"),
            ({"world_size": 0}, "world_size must be a whole number from 1"),
            ({"attempt": 0}, "attempt"),
            ({"kwargs": [1]}, "kwargs must be a dict"),
            ({"entrypoint": None}, "entrypoint must be text"),
            ({"rendezvous_uri": 5}, "rendezvous_uri must be text or None"),
            ({"timeout": -1.0}, "timeout must be a number of seconds"),
            ({"timeout": float("inf")}, "timeout"),
            ({"grace": None}, "grace"),
            ({"grace": float("nan")}, "grace"),
        ],
    )
    def test_what_is_impossible_is_refused(self, change, told):
        with pytest.raises(InvalidRequestError, match=told):
            replace(ReplicaSpec("m:f", {}, 0, 2), **change)

    @given(specs)
    def test_equal_specs_have_equal_hashes(self, spec):
        other = replace(spec, kwargs=dict(reversed(spec.kwargs.items())))
        assert other == spec
        assert hash(other) == hash(spec)
