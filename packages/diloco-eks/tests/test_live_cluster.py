"""Which cluster the live tests run on."""

import pytest
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
