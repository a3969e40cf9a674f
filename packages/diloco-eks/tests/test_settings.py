"""What an executor is made with."""

import re

import pytest

from diloco_protocol import InvalidRequestError


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"image": ""}, "image must be"),
        ({"image": "a b"}, "image must be"),
        ({"image": None}, "image must be"),
        ({"namespace": "Team_A"}, "namespace must be"),
        ({"service_account_name": "Trainer"}, "service_account_name must be"),
        ({"runtime_class_name": "g/visor"}, "runtime_class_name must be"),
        ({"command": "python -m x"}, "write ['python', '-m', 'x']"),
        ({"command": []}, "command must be"),
        ({"cpu_request": "many"}, "cpu_request must be"),
        ({"memory_request": "16GB"}, "say '16G'"),
        ({"ttl_seconds_after_finished": -1}, "ttl_seconds_after_finished must be"),
        ({"ttl_seconds_after_finished": 1.5}, "ttl_seconds_after_finished must be"),
        ({"gpu_resource_key": "nvidia.com/"}, "gpu_resource_key has"),
        ({"node_selector": {"a": 1}}, "node_selector must map"),
        ({"node_selector": {"a b": "c"}}, "node_selector has"),
        ({"tolerations": "x"}, "tolerations must be a list"),
        ({"tolerations": [{"keys": "x"}]}, "a toleration is"),
        ({"labels": {"a": "b c"}}, "annotations="),
        ({"annotations": {"diloco.dev/x": "y"}}, "annotations may not set"),
        ({"owner": "ada lovelace"}, "owner"),
        ({"queue": ""}, "queue must be"),
        ({"on_replica_failure": "restart"}, "one of fail_run, continue"),
        ({"pending_timeout": -1}, "pending_timeout must be"),
        ({"grace": None}, "grace must be"),
        ({"grace": float("inf")}, "grace must be"),
        ({"shm_size": "8GB"}, "shm_size must be"),
        ({"efa": True}, "efa must be"),
        ({"pod_overlay": {"spec": {1, 2}}}, "pod_overlay must hold JSON"),
    ],
)
def test_values_that_are_refused(settings, values, what):
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        settings(**values)


def test_a_wrapper_may_start_the_runner(settings):
    command = ["tini", "--", "/opt/venv/bin/python", "-m", "diloco_protocol.runner"]
    assert settings(command=command).command == tuple(command)
