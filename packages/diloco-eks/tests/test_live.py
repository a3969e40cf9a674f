"""Replicas that really run: as local processes, or (``-m live``) on the cluster of ``$KUBECONFIG``.

``live_cluster`` says which variables name the cluster. Nothing is left of it.
"""

import functools
import time

import pytest
from kubernetes import config
from live_cluster import live_cluster
from real_cluster import sparing_executor

from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, Reason, ReplicaNotFoundError


@pytest.fixture(params=["processes", pytest.param("live", marks=pytest.mark.live)])
def live(request, tmp_path):
    """Makes executors of a cluster that runs what it is given."""
    backoff = Backoff(first=0.1, factor=1.3, cap=2.0)
    values = {
        "cpu_request": "100m",
        "memory_request": "128Mi",
        "grace": 2.0,
        "backoff": backoff,
        "run_id": "live",
    }
    if request.param == "live":
        cluster = live_cluster()
        where = {
            "kubeconfig": cluster.kubeconfig,
            "context": cluster.context,
            "namespace": cluster.namespace,
        }
        api = config.new_client_from_config(cluster.kubeconfig, context=cluster.context)
        executor = sparing_executor(api, cluster.namespace, lambda check, _: until(check))
        yield from made(cluster.image, {**values, **where}, executor)
        return
    with KubernetesProcesses(backoff_seconds=0.5) as stand_in:
        values["kubeconfig"] = stand_in.kubeconfig(tmp_path / "kubeconfig")
        yield from made("any", values)


def made(image, values, executor=EKSExecutor):
    executors = []

    def make(**more):
        executors.append(executor(image, **{**values, **more}))
        return executors[-1]

    yield make
    for executor in executors:
        executor.close()


@pytest.fixture
def finish():
    """Ends and removes what a test has launched."""
    launched = []

    def note(executor, handles):
        launched.append((executor, handles))
        return handles

    yield note
    for executor, handles in launched:
        executor.cancel(handles[0])
        executor.collect(handles, timeout=120)
        executor.purge(handles[0])
        until(functools.partial(gone, executor, handles[0]), 60)


def gone(executor, handle):
    try:
        executor.poll(handle)
    except ReplicaNotFoundError:
        return True
    return False


def until(check, seconds=120):
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_results_and_logs(live, finish):
    executor = live()
    value = {"deep": [1, None, {"text": "$(HOME) $$"}]}
    text = '{"deep": [1, null, {"text": "$(HOME) $$"}]}'
    handles = finish(executor, executor.launch_replicas(2, "json:loads", {"s": text}))
    assert [result["result"] for result in executor.collect(handles, timeout=300)] == [value, value]
    handles = finish(executor, executor.launch_replicas(1, "builtins:print", {"end": "one\ntwo\n"}))
    assert list(executor.log_iter(handles[0], follow=True)) == ["one", "two"]
    assert executor.stream_logs(handles[0], n_lines=1) == "two"
    elsewhere = live()
    assert elsewhere.attach(handles[0].run_id) == handles
    assert elsewhere.poll(handles[0]) == "succeeded"


def test_a_large_result(live, finish):
    executor = live()
    text = '"' + "x" * 60_000 + '"'
    handles = finish(executor, executor.launch_replicas(1, "json:loads", {"s": text}))
    (result,) = executor.collect(handles, timeout=300)
    assert result["result"] == "x" * 60_000
    assert executor.stream_logs(handles[0]) == ""


def test_a_failure_is_named(live, finish):
    executor = live(on_replica_failure="continue")
    handles = finish(executor, executor.launch_replicas(1, "json:loads", {"s": "{"}))
    (result,) = executor.collect(handles, timeout=300)
    assert (result["status"], result["exit_code"], result["reason"]) == ("failed", 1, "error")
    assert "JSONDecodeError" in result["error"]
    assert "JSONDecodeError" in executor.stream_logs(handles[0])


def test_a_failure_is_tried_again(live, finish):
    executor = live()
    handles = finish(
        executor, executor.launch_replicas(1, "json:loads", {"s": "{"}, max_restarts=1)
    )
    (result,) = executor.collect(handles, timeout=300)
    assert (result["status"], result["attempt"]) == ("failed", 2)
    assert "JSONDecodeError" in executor.stream_logs(handles[0], attempt=1)


def test_a_timeout_is_the_runners(live, finish):
    executor = live()
    options = {"timeout": 2.0}
    handles = finish(
        executor,
        executor.launch_replicas(1, "subprocess:call", {"args": ["sleep", "600"]}, **options),
    )
    (result,) = executor.collect(handles, timeout=300)
    assert (result["status"], result["reason"]) == ("failed", "timeout")
    assert "longer than its timeout of 2 s" in result["error"]


def test_a_cancel_ends_all(live, finish):
    executor = live()
    handles = finish(
        executor, executor.launch_replicas(2, "subprocess:call", {"args": ["sleep", "600"]})
    )
    until(lambda: [str(executor.poll(handle)) for handle in handles] == ["running", "running"])
    executor.cancel(handles[0])
    results = executor.collect(handles, timeout=120)
    assert [result["status"] for result in results] == ["cancelled", "cancelled"]
    assert executor.describe(handles[1]).reason is Reason.CANCEL_REQUESTED
