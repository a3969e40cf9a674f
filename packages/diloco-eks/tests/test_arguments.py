"""Large arguments travel in the Job, and larger ones are refused."""

import json

import pytest
from eks_lab import PATIENCE

from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, InvalidRequestError

LARGE = {"text": "x" * 150_000}


def test_another_order_of_the_keys_is_the_same_launch(bench):
    run = bench.launch(1, kwargs={**LARGE, "a": {"b": 1, "c": 2}})
    again = bench.launch(1, kwargs={"a": {"c": 2, "b": 1}, **LARGE}, executor=run.executor)
    assert again.handles == run.handles


def test_what_is_too_large_is_refused(bench):
    with pytest.raises(InvalidRequestError, match=r"a pod may carry 262144: .* into the store"):
        bench.launch(1, kwargs={"text": "x" * 200_000})
    assert not [call for call in bench.stand_in.calls if call.verb == "create"]


def test_they_say_where_the_run_meets(bench):
    uri = "s3://bucket/run"
    run = bench.launch(1, kwargs={**LARGE, "rendezvous_uri": uri})
    assert bench.executor().meets_at(run.handles[0]) == uri


@pytest.mark.processes
def test_they_arrive(tmp_path):
    text = json.dumps("y" * 180_000)
    with (
        KubernetesProcesses(tls=False) as cluster,
        EKSExecutor(
            "any",
            kubeconfig=cluster.kubeconfig(tmp_path / "kubeconfig"),
            cpu_request="1",
            memory_request="1Gi",
            backoff=Backoff(first=0.1, cap=0.5),
        ) as executor,
    ):
        handles = executor.launch_replicas(2, "json:loads", {"s": text})
        results = executor.collect(handles, timeout=PATIENCE)
    assert [len(result["result"]) for result in results] == [180_000] * 2
