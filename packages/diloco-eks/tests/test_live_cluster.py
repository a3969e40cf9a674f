"""Which cluster the live tests run on."""

import pytest
from exec_puppets import has_ended
from kubernetes import config
from live_cluster import LiveCluster, live_cluster
from real_cluster import MOST_PODS, sparing_executor


def test_without_a_cluster_nothing_begins(monkeypatch):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("DILOCO_LIVE_IMAGE", "")
    with pytest.raises(
        pytest.UsageError, match="need KUBECONFIG and DILOCO_LIVE_IMAGE; the README"
    ):
        live_cluster()


def test_what_the_environment_names(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/k")
    monkeypatch.setenv("DILOCO_LIVE_IMAGE", "image:1")
    for name in ("NAMESPACE", "CONTEXT"):
        monkeypatch.delenv(f"DILOCO_LIVE_{name}", raising=False)
    assert live_cluster() == LiveCluster("/k", "image:1", "default", None)
    monkeypatch.setenv("DILOCO_LIVE_NAMESPACE", "team")
    monkeypatch.setenv("DILOCO_LIVE_CONTEXT", "east")
    assert live_cluster() == LiveCluster("/k", "image:1", "team", "east")


@pytest.mark.parametrize(
    "words",
    [
        'container not found ("replica")',
        "Internal error occurred: error executing command in container: failed to exec in "
        "container: container is in CONTAINER_EXITED state",
        "Internal error occurred: failed to create exec: cannot exec in a stopped state: unknown",
        "Internal error occurred: error writing config to pipe: write init-p: broken pipe: unknown",
    ],
)
def test_a_container_that_ends_under_an_exec_is_no_fault(words):
    assert has_ended(words)


@pytest.mark.parametrize(
    "words",
    [
        "command terminated with exit code 2",
        "Internal error occurred: error executing command in container: failed to exec in "
        "container: failed to start exec: "
        'OCI runtime exec failed: exec failed: unable to start container process: exec: "sh": '
        "executable file not found in $PATH",
    ],
)
def test_a_command_that_fails_has_not_ended_its_container(words):
    assert not has_ended(words)


def test_a_launch_waits_for_room_beside_all_pods_of_ours(bench):
    """Pods of other runs, of a Job that is gone while they still end, and pods to come."""
    api, waited = config.new_client_from_config(str(bench.kubeconfig)), []

    def wait(has_room, what):
        while not has_room():
            waited.append(len(bench.world.pods()))
            bench.world.advance(1)

    bench.world.auto_start = 0.1
    executor = sparing_executor(api, "default", wait)("any", kubeconfig=bench.kubeconfig)
    deleted = bench.launch(MOST_PODS - 4, run_id="deleted")
    for pod in bench.pods(deleted.handles[0]):
        pod.on_term(143, after=8.0)
    job = "/apis/batch/v1/namespaces/default/jobs/deleted"
    bench.create(job, {"propagationPolicy": "Background"}, method="DELETE")
    executor.launch_replicas(4, "trainer:train", run_id="beside")
    assert waited == []
    executor.launch_replicas(1, "trainer:train", run_id="later")
    assert waited
    assert min(waited) == MOST_PODS - 4  # the first look is before the others have come
    bench.world.advance(2)  # now its pods are there, too
    phases = [pod.json["status"]["phase"] for pod in bench.world.pods()]
    assert len([phase for phase in phases if phase in {"Pending", "Running"}]) <= MOST_PODS
    executor.close()
    api.rest_client.pool_manager.clear()
