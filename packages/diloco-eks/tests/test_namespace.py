"""Where runs are launched if nobody says."""

import json
import os

import pytest

from diloco_eks import EKSExecutor
from diloco_eks._client._kubeconfig import namespace_of
from diloco_protocol import AuthError, InvalidRequestError


def config(path, current="a", **namespaces):
    contexts = [
        {"name": name, "context": {"cluster": "c", **({"namespace": space} if space else {})}}
        for name, space in namespaces.items()
    ]
    path.write_text(json.dumps({"current-context": current, "contexts": contexts}))
    return path


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_it_is_that_of_the_context(tmp_path):
    path = config(tmp_path / "one", a="team", b="other", c=None)
    assert namespace_of(path, None) == "team"
    assert namespace_of(path, "b") == "other"
    assert namespace_of(path, "c") == "default"
    assert namespace_of(path, "none") == "default"


def test_several_files(tmp_path, monkeypatch):
    first = config(tmp_path / "one", current="b", a="team")
    second = config(tmp_path / "two", current="a", b="other", a="never")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(first), str(second)]))
    assert namespace_of(None, None) == "other"
    assert namespace_of(None, "a") == "team"


@pytest.mark.parametrize("content", [None, "", "# nothing yet"])
def test_without_a_file_or_with_an_empty_one(tmp_path, content):
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    assert namespace_of(path, None) == "default"


@pytest.mark.parametrize("content", ["{", "[]", "a: [", '{"contexts": [1, {"context": 2}]}'])
def test_what_cannot_be_read_may_have_named_another(tmp_path, content):
    (tmp_path / "config").write_text(content)
    with pytest.raises(AuthError, match=r"the kubeconfig .*config"):
        namespace_of(tmp_path / "config", None)


def test_a_folder_that_is_called_like_a_home_is_none(tmp_path, monkeypatch):
    """Without a home, a kubeconfig in a folder of the name "~" could run its plugins."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~" / ".kube").mkdir(parents=True)
    config(tmp_path / "~" / ".kube" / "config", a="planted")
    with pytest.raises(AuthError, match=r"'~/.kube/config' is in a home folder that is not known"):
        namespace_of(None, None)


def test_a_service_accounts_that_is_no_text(tmp_path, monkeypatch):
    (tmp_path / "token").touch()
    (tmp_path / "namespace").write_bytes(b"\xff")
    monkeypatch.setattr("diloco_eks._client._kubeconfig.ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for name in ("KUBECONFIG", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequestError, match="the namespace of the pod's account"):
        namespace_of(None, None)


@pytest.mark.parametrize("space", ["a/b", "..", " ", "Team"])
def test_what_can_be_none(tmp_path, space):
    with pytest.raises(InvalidRequestError, match="the namespace of the kubeconfig's context"):
        namespace_of(config(tmp_path / "one", a=space), None)


def test_an_executor_launches_and_looks_there(bench):
    known = json.loads(bench.kubeconfig.read_text())
    known["contexts"][0]["context"]["namespace"] = "team"
    bench.kubeconfig.write_text(json.dumps(known))
    bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    executor = bench.executor()
    handles = executor.launch_replicas(1, "a:b", run_id="run-1")
    assert handles[0].metadata["namespace"] == "team"
    assert executor.list_runs() == ["run-1"]
    assert executor.attach("run-1") == handles
    assert bench.executor(namespace="default").list_runs() == []


def test_a_plan_needs_no_cluster(tmp_path):
    (job,) = EKSExecutor("image", kubeconfig=tmp_path / "none").plan(1, "a:b").requests
    assert job["metadata"]["namespace"] == "default"
