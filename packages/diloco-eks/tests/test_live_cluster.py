"""Which cluster the live tests run on."""

import pytest
from exec_puppets import has_ended
from live_cluster import LiveCluster, live_cluster


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
        "Internal error occurred: error executing command in container: failed to exec in container: "
        "container is in CONTAINER_EXITED state",
        "Internal error occurred: failed to create exec: cannot exec in a stopped state: unknown",
        "Internal error occurred: error writing config to pipe: write init-p: broken pipe: unknown",
    ],
)
def test_a_container_that_ends_under_an_exec_is_no_fault(words):
    assert has_ended(words)
    assert not has_ended("command terminated with exit code 2")
