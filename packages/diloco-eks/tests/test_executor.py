"""The executor itself: its options, and what it leaves alone."""

import inspect

import pytest

from diloco_eks import EKSExecutor
from diloco_protocol import (
    executors,
)


def test_the_constructors_values_are_defaults(bench):
    executor = bench.executor(backoff_limit=2, env={"A": "1", "B": "1"}, cpu_request="2")
    (job,) = executor.plan(1, "trainer:train", env={"B": "2"}).requests
    entries = {
        e["name"]: e.get("value") for e in job["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert (entries["A"], entries["B"]) == ("1", "2")
    assert job["spec"]["backoffLimitPerIndex"] == 2
    (job,) = executor.plan(1, "trainer:train", max_restarts=0, cpu="8").requests
    assert job["spec"]["backoffLimitPerIndex"] == 0
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "8"


def test_options_are_the_constructors(bench):
    names = [name for name in inspect.signature(EKSExecutor.__init__).parameters if name != "self"]
    assert [option.name for option in bench.executor().options()] == [
        name for name in names if name != "clock"
    ]


def test_it_is_found_among_the_installed_backends():
    found = executors()
    if "eks" not in found:
        pytest.skip("diloco-eks is on the path, but not installed")
    assert found["eks"].backend_name == "eks"


def test_no_threads_no_global_configuration(bench):
    from kubernetes import client

    before = client.Configuration.get_default_copy().host
    bench.launch(1)
    assert client.Configuration.get_default_copy().host == before
