"""What is served on loopback: started, trusted, found and stopped."""

from __future__ import annotations

import json
import os
import socket
import stat

import pytest
from kubernetes import client

from diloco_localcloud import KubernetesStandIn, StandInError
from diloco_localcloud._server import _tls


@pytest.mark.parametrize("tls", [True, False])
def test_a_kubeconfig_for_the_real_client(tmp_path, connect, tls):
    if tls and not _tls.available():
        pytest.skip("there is no openssl command here")
    with KubernetesStandIn(tls=tls, namespace="team") as stand_in:
        assert stand_in.url.startswith("https://" if tls else "http://")
        path = stand_in.kubeconfig(tmp_path / "config")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        api = connect(str(path))
        assert client.VersionApi(api).get_code().git_version.startswith("v1.34")
        assert client.CoreV1Api(api).list_namespaced_pod(namespace="team").items == []
        assert json.loads(path.read_text())["contexts"][0]["context"]["namespace"] == "team"


def test_the_certificate_is_checked():
    if not _tls.available():
        pytest.skip("there is no openssl command here")
    import ssl
    import urllib.error
    import urllib.request

    with KubernetesStandIn(tls=True) as stand_in:
        strict = ssl.create_default_context(cadata=stand_in.authority)
        strict.verify_flags |= ssl.VERIFY_X509_STRICT
        with urllib.request.urlopen(stand_in.url + "/healthz", context=strict) as answer:
            assert answer.read() == b"ok"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(stand_in.url + "/healthz", context=ssl.create_default_context())


def test_no_tls_without_openssl(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    _tls.make.cache_clear()
    with KubernetesStandIn() as stand_in:
        assert stand_in.url.startswith("http://")
        assert stand_in.authority is None
    with pytest.raises(StandInError, match="TLS needs the command openssl"):
        KubernetesStandIn(tls=True).start()


@pytest.mark.parametrize("name", ["A_B", "", "a" * 64, "-a"])
def test_a_namespace_that_no_cluster_has(name):
    with pytest.raises(StandInError, match="no namespace can have the name"):
        KubernetesStandIn(namespace=name)


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            StandInError, match=rf"port {port} of 127.0.0.1 cannot be used: .*; choose another"
        ):
            KubernetesStandIn(port=port, tls=False).start()


def test_a_kubeconfig_that_cannot_be_written(tmp_path):
    with (
        KubernetesStandIn(tls=False) as stand_in,
        pytest.raises(StandInError, match=r"cannot be written to .*choose another"),
    ):
        stand_in.kubeconfig(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_there_and_is_no_file_keeps_its_mode(tmp_path, make):
    place = tmp_path / "place"
    make(place)
    place.chmod(0o750)
    with (
        KubernetesStandIn(tls=False) as stand_in,
        pytest.raises(StandInError, match=r"cannot be written to .*Not a regular file; choose"),
    ):
        stand_in.kubeconfig(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o750
    assert list(tmp_path.iterdir()) == [place]


def test_whoever_has_opened_the_file_before_does_not_read_the_token(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with (tmp_path / "real").open() as before, KubernetesStandIn(tls=False) as stand_in:
        assert stand_in.kubeconfig(tmp_path / "link") == tmp_path / "link"
        assert before.read() == "old"
        assert stand_in.token in (tmp_path / "real").read_text()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600
    assert (tmp_path / "link").is_symlink()


def test_started_once_and_stopped_twice():
    stand_in = KubernetesStandIn(tls=False)
    with pytest.raises(StandInError, match="is not started"):
        _ = stand_in.url
    stand_in.start()
    with pytest.raises(StandInError, match="is already running"):
        stand_in.start()
    stand_in.stop()
    stand_in.stop()


def test_two_worlds_are_apart(connect):
    with KubernetesStandIn(tls=False) as one, KubernetesStandIn(tls=False) as other:
        first = connect(one.kubeconfig_dict())
        client.CoreV1Api(first).create_namespace(body={"metadata": {"name": "a"}})
        second = connect(other.kubeconfig_dict())
        names = [each.metadata.name for each in client.CoreV1Api(second).list_namespace().items]
        assert names == ["default", "kube-system"]
