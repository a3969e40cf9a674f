"""The account of a pod, whose token changes, is damaged, or vanishes."""

import datetime
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from diloco_protocol import AuthError, DilocoError, InvalidRequestError


@pytest.fixture
def account(bench, tmp_path, monkeypatch):
    """The folder of a pod's account; the client reads the token anew for each call."""
    from kubernetes.config import incluster_config

    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text(bench.stand_in.access.token)
    (folder / "ca.crt").write_text(bench.stand_in.authority)
    address = urlsplit(bench.stand_in.url)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", address.hostname)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in ("_kubeconfig", "_client"):
        monkeypatch.setattr(f"diloco_eks._client.{module}.ACCOUNT", folder)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(folder / "ca.crt"))

    hurried = SimpleNamespace(
        datetime=datetime.datetime, timedelta=lambda **_: datetime.timedelta()
    )
    monkeypatch.setattr(incluster_config, "datetime", hurried)
    return folder


@pytest.fixture
def inside(bench, account):
    if not bench.stand_in.authority:
        pytest.skip("the stand-in has no TLS here: there is no openssl command")
    return bench.executor(kubeconfig=None, namespace="default", retry_timeout=1)


def test_a_line_end_behind_the_token(inside, account):
    with (account / "token").open("a") as file:
        file.write("\n")
    for _ in range(3):
        assert inside.list_runs() == []


def test_a_token_that_is_renewed(bench, inside, account):
    assert inside.list_runs() == []
    bench.stand_in.access.token = "renewed"
    (account / "token").write_text("renewed")
    assert inside.list_runs() == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", AuthError, r"as .*account says: .*Token file exists but empty"),
        (b"\xff", AuthError, "as .*account says: .*codec can't decode"),
        (b" \n", AuthError, "Unauthorized"),
        (b"sesam\nopen", InvalidRequestError, "a header has a value that cannot be sent"),
        ("sesam\N{EURO SIGN}".encode(), InvalidRequestError, "a header has a value that cannot"),
        (None, AuthError, "as .*account says: .*Service token file does not exist"),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_token_that_cannot_be_used(bench, inside, account, before, content, error, words):
    """A launch knows that it has started nothing, and no other cluster is asked."""
    for _ in range(before):
        inside.list_runs()
    if before:  # the one that it has can be used until the cluster refuses it
        bench.stand_in.access.token = "renewed"
    bench.kubeconfig.parent.joinpath(".kube").mkdir()
    bench.stand_in.kubeconfig(bench.kubeconfig.parent / ".kube" / "config")
    if content is None:
        (account / "token").unlink()
    else:
        (account / "token").write_bytes(content)
    if content is None and not before:
        assert inside.list_runs() == []  # as for kubectl, this is no pod with an account
        return
    for verb in (inside.list_runs, lambda: inside.launch_replicas(1, "a:b"), inside.list_runs):
        with pytest.raises(DilocoError, match=words) as caught:
            verb()
        assert type(caught.value) is error
    assert bench.world.pods("run-1") == []
