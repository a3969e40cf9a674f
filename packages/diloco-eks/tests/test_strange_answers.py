"""Answers that no cluster gives: named, and never more of them than fits."""

import json

import pytest
from strange_server import strange_server

from diloco_eks import EKSExecutor, _client
from diloco_protocol import BackendError, UnavailableError


@pytest.fixture
def server():
    with strange_server() as server:
        yield server


@pytest.fixture
def executor(server, tmp_path):
    config = {
        "clusters": [{"name": "one", "cluster": {"server": server.url}}],
        "contexts": [{"name": "one", "context": {"cluster": "one"}}],
        "current-context": "one",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    with EKSExecutor("image", kubeconfig=tmp_path / "config", retry_timeout=0) as executor:
        yield executor


@pytest.mark.parametrize(
    "body",
    [b"<html>log in</html>", b'{"items": ', b'{"n": ' + b"9" * 5000 + b"}", b"[" * 50_000, b"\xff"],
    ids=["a page", "cut", "digits", "deep", "bytes"],
)
@pytest.mark.parametrize("status", [200, 503])
def test_what_is_not_json_is_named(server, executor, body, status):
    server.body, server.status = body, status
    with pytest.raises(UnavailableError, match="cannot list Jobs in default") as caught:
        executor.list_runs()
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("status", [200, 503])
def test_no_half_of_a_secret_is_left_where_an_answer_is_cut(server, executor, status):
    """The @ that tells where a password ends is what would be cut off."""
    shown = {200: 200, 503: 500}[status]
    for before in range(shown - 45, shown, 3):
        server.body = b"x" * before + b" https://user:hunter2hunter2hunter2@proxy.example/"
        server.status = status
        with pytest.raises(UnavailableError) as caught:
            executor.list_runs()
        assert "xxx" in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_an_answer_without_an_end_is_not_read_to_it(server, executor, monkeypatch):
    monkeypatch.setattr(_client, "_ANSWER_BYTES", 10_000)
    server.body = b'{"items": []' + b" " * 20_000 + b"}"
    with pytest.raises(BackendError, match="the answer is larger than 10000 bytes"):
        executor.list_runs()
    server.body = b'{"items": []' + b" " * 9_000 + b"}"
    assert executor.list_runs() == []


@pytest.mark.parametrize("status", [403, 503])
def test_of_a_refusal_no_more_is_read_than_fits(server, executor, monkeypatch, status):
    monkeypatch.setattr(_client, "_REFUSAL_BYTES", 10_000)
    for size, shown in ((9_000, "no"), (20_000, '{"message": "no", "more": "xxx')):
        server.body, server.status = b'{"message": "no", "more": "%s"}' % (b"x" * size), status
        with pytest.raises(BackendError) as caught:
            executor.list_runs()
        assert str(caught.value).startswith(f"cannot list Jobs in default: {shown}")


def test_a_refusal_without_a_word_has_its_status(server, executor):
    server.body, server.status = b"", 502
    with pytest.raises(UnavailableError, match="cannot list Jobs in default: HTTP status 502"):
        executor.list_runs()


def test_of_an_objects_events_one_page_is_read(server, executor):
    server.body = json.dumps({"items": [], "metadata": {"continue": "more"}}).encode()
    executor._cluster.list_events("default", "u-1")
    assert len(server.asked) == 1
    assert "limit=250" in server.asked[0][1]
