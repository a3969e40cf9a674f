"""Environment variables arrive exactly as given."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._request._environment import container_environment, escape, runner_arguments
from diloco_protocol import (
    InvalidRequestError,
    ReplicaSpec,
    spec_from_arguments,
    spec_from_environment,
    spec_to_environment,
)

SPEC = ReplicaSpec("trainer:train", {"a": [1, {"b": "$(HOME) $$"}]}, rank=0, world_size=2)


def expand(text, known):
    """What a kubelet makes of a value: $$ is a dollar, $(NAME) a variable if there is one."""

    def replace(match):
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@given(
    st.text(st.sampled_from("$()AB x"), max_size=30),
    st.dictionaries(st.sampled_from(["A", "AB", ""]), st.text()),
)
def test_expansion_gives_back_what_went_in(value, known):
    assert expand(escape(value), known) == value


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), st.text(max_size=30), max_size=4
    )
)
def test_all_variables_arrive(env):
    known = {}
    for entry in container_environment(spec_to_environment(SPEC), env, {}):
        if "value" in entry:
            known[entry["name"]] = expand(entry["value"], known)
    assert {name: known[name] for name in env} == env
    assert spec_from_environment(known) == SPEC


def test_the_attempt_comes_from_the_pods_annotations():
    entries = container_environment(spec_to_environment(SPEC), {}, {})
    fields = [
        entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in entries if "valueFrom" in entry
    ]
    assert fields == [
        "metadata.annotations['batch.kubernetes.io/job-index-failure-count']",
        "metadata.annotations['batch.kubernetes.io/job-index-ignored-failure-count']",
    ]
    known = {
        "JOB_COMPLETION_INDEX": "3",
        "DILOCO_EKS_FAILURES": "1",
        "DILOCO_EKS_IGNORED_FAILURES": "",
    }
    told = ["--index=3", "--failed=1", "--failed=", "--message", "/dev/termination-log"]
    arguments = runner_arguments("/dev/termination-log", [])
    assert [expand(argument, known) for argument in arguments] == told


def test_the_runner_takes_the_pieces_that_the_pod_itself_names():
    pieces = spec_to_environment(SPEC, piece_bytes=30)
    known = {**pieces, f"DILOCO_SPEC_{len(pieces)}": "eA=="}
    arguments = [expand(each, known) for each in runner_arguments("/x", pieces)]
    assert spec_from_arguments(arguments) == SPEC


def test_secrets_are_referred_to():
    (entry,) = [
        e
        for e in container_environment(spec_to_environment(SPEC), {}, {"TOKEN": "hub/token"})
        if e["name"] == "TOKEN"
    ]
    assert entry == {
        "name": "TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    }


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "DILOCO_EKS_FAILURES"])
def test_names_that_are_taken(name):
    for env, secrets in (({name: "1"}, {}), ({}, {name: "a/b"})):
        with pytest.raises(InvalidRequestError, match=f"{name} may not be set"):
            container_environment(spec_to_environment(SPEC), env, secrets)
