"""What an executor is made with."""

import inspect
import re
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest

from diloco_eks import EKSExecutor, EKSOptions
from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import options_of, options_table


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"image": ""}, "image must be"),
        ({"image": "a b"}, "image must be"),
        ({"image": None}, "image must be"),
        ({"image": "a\0b"}, "image must be"),
        ({"image": "a\ud800"}, "image must be"),
        ({"run_id": "Bad Name!"}, "run_id='Bad Name!' cannot begin the names of runs"),
        ({"namespace": "Team_A"}, "namespace must be"),
        ({"service_account_name": "Trainer"}, "service_account_name must be"),
        ({"runtime_class_name": "g/visor"}, "runtime_class_name must be"),
        ({"command": "python -m x"}, "write ['python', '-m', 'x']"),
        ({"command": []}, "command must be"),
        ({"cpu_request": "many"}, "cpu_request must be"),
        ({"memory_request": "16GB"}, "say '16G'"),
        ({"ttl_seconds_after_finished": -1}, "ttl_seconds_after_finished must be"),
        (
            {"ttl_seconds_after_finished": 59},
            "ttl_seconds_after_finished must be a whole number from 60",
        ),
        ({"ttl_seconds_after_finished": 1.5}, "ttl_seconds_after_finished must be"),
        ({"gpu_resource_key": "nvidia.com/"}, "gpu_resource_key has"),
        ({"node_selector": {"a": 1}}, "node_selector must map"),
        ({"gpu_resource_key": "cpu"}, "gpu_resource_key must be the name of an extended resource"),
        ({"node_selector": {"a b": "c"}}, "node_selector has"),
        ({"node_selector": {"a": "b c"}}, "node_selector['a'] must be at most 63 letters"),
        ({"tolerations": "x"}, "tolerations must be a list"),
        ({"tolerations": [5]}, "tolerations[0] must be a mapping, not a whole number"),
        ({"labels": {"a": "b c"}}, "annotations="),
        ({"annotations": {"diloco.dev/x": "y"}}, "annotations may not set"),
        ({"owner": "ada lovelace"}, "owner must be"),
        ({"queue": ""}, "queue must be"),
        ({"queue": "a b"}, "queue must be at most 63 letters, digits, '-', '_' and '.'"),
        ({"on_replica_failure": "restart"}, "one of fail_run, continue"),
        ({"pending_timeout": -1}, "pending_timeout must be"),
        ({"grace": None}, "grace must be"),
        ({"grace": float("inf")}, "grace must be"),
        ({"grace": 1e300}, "grace must be a number of seconds from 0 to 86400"),
        ({"shm_size": "8GB"}, "shm_size must be"),
        ({"efa": True}, "efa must be"),
        ({"backoff_limit": -1}, "backoff_limit must be a whole number from 0 to 1000, not -1"),
        ({"env": {"REPLICA_WORLD_SIZE": "1"}}, "env may not set REPLICA_WORLD_SIZE"),
        ({"request_timeout": True}, "request_timeout must be a number of seconds from 0 to 86400"),
        ({"retry_timeout": 1e6}, "retry_timeout must be a number of seconds from 0 to 86400"),
        ({"pod_overlay": {"spec": {1, 2}}}, "pod_overlay.spec is a builtins.set"),
        ({"image": 10**5000}, "image must be the name of a container image, not a number of that"),
        ({"command": "echo it's"}, "write ['echo', \"it's\"]"),
        ({"tolerations": [{"key": float("nan")}]}, "tolerations[0].key must be text, not a number"),
        ({"tolerations": [{"key": "\ud800"}]}, "half of a surrogate pair"),
        ({"tolerations": [{"tolerationSeconds": "5"}]}, "tolerationSeconds must be a whole number"),
    ],
)
def test_values_that_are_refused(options_for, values, what):
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        options_for(**values)


_ALLOWED = [
    ("cpu_request", 5.5),
    ("cpu_limit", 5.5),
    ("grace", 5.5),
    ("pending_timeout", 5.5),
    ("request_timeout", 5.5),
    ("retry_timeout", 5.5),
]


@pytest.mark.sampled
@pytest.mark.parametrize("value", [..., 5.5, b"bytes", {1: 2}, [None]], ids=str)
@pytest.mark.parametrize("name", [each.name for each in fields(EKSOptions)])
def test_whatever_is_given_is_refused_by_name_or_allowed(options_for, name, value):
    if (name, value) in _ALLOWED:
        return
    with pytest.raises(InvalidRequestError, match=rf"^{name}\b"):
        options_for(**{name: value})


def test_a_wrapper_may_start_the_runner(options_for):
    command = ["tini", "--", "/opt/venv/bin/python", "-m", "diloco_protocol.runner"]
    assert options_for(command=command).command == tuple(command)


def test_what_was_given_is_not_what_is_kept(options_for):
    labels = {"team": "a"}
    options = options_for(labels=labels, pending_timeout=60, cpu_request=8)
    labels["team"] = "b"
    assert options.labels == {"team": "a"}
    assert (options.pending_timeout, options.cpu_request) == (60.0, "8")
    with pytest.raises(FrozenInstanceError):
        options.namespace = "other"


def test_secrets_among_the_variables_are_not_in_the_representation(options_for):
    assert "hunter2" not in repr(options_for(env={"TOKEN": "hunter2"}))


def test_the_constructor_takes_the_fields_by_name():
    parameters = inspect.signature(EKSExecutor).parameters
    assert list(parameters) == [each.name for each in fields(EKSOptions)]
    first, *others = parameters.values()
    assert (first.name, first.kind, first.default) == (
        "image", first.POSITIONAL_OR_KEYWORD, first.empty,
    )  # fmt: skip
    assert {each.kind for each in others} == {first.KEYWORD_ONLY}
    for each in fields(EKSOptions):
        assert each.default is MISSING or parameters[each.name].default is each.default


@pytest.mark.parametrize("arguments", [(), ("image", "default")])
def test_arguments_that_the_constructor_does_not_have(arguments):
    with pytest.raises(TypeError, match=r"image|positional"):
        EKSExecutor(*arguments)
    with pytest.raises(TypeError, match="namespce"):
        EKSExecutor("image", namespce="default")


def test_every_option_says_what_it_is_for():
    listed = options_of(EKSOptions)
    assert [each.name for each in listed if len(each.help) < 15] == []
    assert {each.name for each in fields(EKSOptions)} - {each.name for each in listed} == {"clock"}
    assert EKSExecutor.__init__.__doc__.count("\n    ") == len(fields(EKSOptions))


def test_the_readme_has_the_options():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- options -->\n")[2].partition("\n<!-- /options -->")[0]
    assert table == options_table(EKSOptions), "print(options_table(EKSOptions)) is the new table"


@pytest.mark.parametrize(
    "command",
    [
        "prog password: hunter2Canary9",
        "run Authorization: Bearer hunter2Canary9",
        "PASSWORD= hunter2Canary9",
    ],
)
def test_the_words_of_a_command_show_no_secret(command):
    with pytest.raises(InvalidRequestError, match="must be a list of words") as caught:
        EKSExecutor("image", command=command)
    assert "hunter2" not in str(caught.value)
