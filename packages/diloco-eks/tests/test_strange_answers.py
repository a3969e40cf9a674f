"""Answers that no cluster gives: named, and never more of them than fits."""

import gzip
import json
import logging
import time
import traceback
from dataclasses import replace

import pytest
from eks_lab import PATIENCE
from strange_server import strange_server

from diloco_eks import EKSExecutor
from diloco_eks._client import _client
from diloco_eks._state._reading import read_pod
from diloco_eks._verbs._launch import create_job
from diloco_eks._verbs._logs import LogSource
from diloco_eks._verbs._results import read_result
from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ResultLostError,
    UnavailableError,
)


@pytest.fixture
def server():
    with strange_server() as server:
        yield server


def kubeconfig(url):
    return {
        "clusters": [{"name": "one", "cluster": {"server": url}}],
        "contexts": [{"name": "one", "context": {"cluster": "one"}}],
        "current-context": "one",
    }


@pytest.fixture
def executor(server, tmp_path):
    (tmp_path / "config").write_text(json.dumps(kubeconfig(server.url)))
    with EKSExecutor("image", kubeconfig=tmp_path / "config", retry_timeout=0) as executor:
        yield executor


@pytest.mark.sampled
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
    server.body = b'{"kind": "JobList", "items": []' + b" " * 20_000 + b"}"
    with pytest.raises(BackendError, match="the answer is larger than 10000 bytes"):
        executor.list_runs()
    server.body = b'{"kind": "JobList", "items": []' + b" " * 9_000 + b"}"
    assert executor.list_runs() == []


@pytest.mark.parametrize("status", [403, 503])
def test_of_a_refusal_no_more_is_read_than_fits(server, executor, monkeypatch, status):
    monkeypatch.setattr(_client, "_REFUSAL_BYTES", 10_000)
    for size, shown in ((9_000, "no"), (20_000, '{"message": "no", "more": "xxx')):
        server.body, server.status = b'{"message": "no", "more": "%s"}' % (b"x" * size), status
        with pytest.raises(BackendError) as caught:
            executor.list_runs()
        assert str(caught.value).startswith(f"cannot list Jobs in default: {shown}")


def refusal(reason="NotFound", **details):
    failure = {"kind": "Status", "status": "Failure", "reason": reason, "details": details}
    return json.dumps({**failure, "message": f"{details} not found"}).encode()


def found(kind="Job", name="run-1", **more):
    return json.dumps({"kind": kind, "metadata": {"name": name, "uid": "u-1"}, **more}).encode()


_NOT_ITS_OWN = {
    "a page": (404, b"<html>nginx</html>"),
    "text": (404, b"404 page not found"),
    "a gateway": (404, b'{"message": "no Route matched"}'),
    "a gateway with a reason": (404, b'{"reason": "NotFound", "details": {"name": "run-1"}}'),
    "another object": (404, refusal(name="run-2", group="batch", kind="jobs")),
    "another kind": (404, refusal(name="run-1", group="management.example", kind="clusters")),
    "no object": (404, refusal()),
    "conflict": (409, b"<html>nginx</html>"),
    "a redirection": (302, b""),
    "a password": (407, b"<html>proxy</html>"),
    "a request that took too long": (408, b""),
    "gone": (410, b"<html>nginx</html>"),
    "empty": (200, b""),
    "nothing": (200, b"{}"),
    "null": (200, b"null"),
    "failure": (200, b'{"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"}'),
    "success": (200, b'{"kind": "Status", "status": "Success", "details": {"name": "run-1"}}'),
    "another Job": (200, found(name="run-2")),
    "a Job without a name": (200, b'{"kind": "Job", "metadata": [], "spec": {}}'),
    "a Pod": (200, found("Pod")),
    "a list of anything": (200, b'{"kind": "List", "items": []}'),
    "a list of nothing": (200, b'{"kind": "JobList", "items": [1]}'),
    "a list of halves": (200, b'{"kind": "JobList", "items": [{"metadata": null}]}'),
    "a kind of any depth": (200, b'{"kind": %s1%s}' % (b"[" * 300, b"]" * 300)),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("status", "body"), _NOT_ITS_OWN.values(), ids=_NOT_ITS_OWN)
def test_what_a_proxy_says_is_not_the_clusters_word(server, executor, status, body):
    server.status, server.body = status, body
    for verb in (
        executor.list_runs,
        lambda: executor.exists("run-1"),
        lambda: executor.attach("run-1"),
        lambda: executor.cancel_run("run-1"),
    ):
        with pytest.raises(UnavailableError, match="look at what stands between"):
            verb()


@pytest.mark.parametrize("details", [{"group": "batch", "kind": "jobs"}, {"kind": "Job"}, {}])
def test_what_the_cluster_itself_does_not_know_is_missing(server, executor, details, monkeypatch):
    monkeypatch.setattr(executor._cluster, "list_orphans", lambda *asked: [])
    server.status, server.body = 404, refusal(name="run-1", **details)
    assert executor.exists("run-1") is False


def test_a_delete_is_believed_if_it_names_what_is_gone(server, executor):
    def success(name):
        details = {"name": name, "group": "batch", "kind": "jobs"}
        return json.dumps({"kind": "Status", "status": "Success", "details": details}).encode()

    for server.body in (success("run-1"), found()):
        executor._cluster.delete_job("default", "run-1", "u-1")
    for server.body in (success("run-2"), found(name="run-2"), b'{"kind": "Status"}'):
        with pytest.raises(UnavailableError, match="not the cluster's own"):
            executor._cluster.delete_job("default", "run-1", "u-1")


def test_a_namespace_is_missing_only_if_the_cluster_says_so(server, executor):
    server.status, server.body = 404, refusal(name="default", kind="namespaces")
    with pytest.raises(InvalidRequestError, match="there is no namespace 'default'"):
        executor.launch_replicas(1, "trainer:train", run_id="run-1")
    server.body = refusal(name="other", kind="namespaces")
    with pytest.raises(LaunchError, match="look at what stands between"):
        executor.launch_replicas(1, "trainer:train", run_id="run-1")


def test_pages_that_go_round_have_an_end(server, executor):
    server.body = found("JobList", items=[]).replace(b'"name": "run-1"', b'"continue": "one"')
    with pytest.raises(UnavailableError, match="its second page is the first one again"):
        executor.list_runs()


def test_what_others_say_is_one_line_of_the_log(server, executor, caplog):
    server.status = 401
    server.body = (
        b'{"kind": "Status", "reason": "Unauthorized", "message": "no\\nCRITICAL \\u001b[2J"}'
    )
    with pytest.raises(AuthError):
        executor.list_runs()
    (told,) = [each.getMessage() for each in caplog.records if each.name == "diloco_eks"]
    assert r"no\nCRITICAL \x1b[2J" in told
    assert told.isprintable()


def test_pages_without_an_end_are_given_up(server, executor, monkeypatch):
    monkeypatch.setattr("diloco_eks._client._cluster._PAGES", 20)
    monkeypatch.setattr("diloco_eks._client._cluster._OBJECTS", 10_000)
    page = {"kind": "JobList", "metadata": {}, "items": []}

    def another(_):
        page["metadata"]["continue"] = f"page {len(server.asked)}"
        return json.dumps(page).encode()

    server.body = another
    with pytest.raises(UnavailableError, match="after 0 objects it was given up"):
        executor.list_runs()
    assert len(server.asked) == 20
    page["items"] = [json.loads(found())] * 1000
    server.asked.clear()
    with pytest.raises(UnavailableError, match="after 11000 objects it was given up"):
        executor.list_runs()


def test_pages_without_an_end_hold_nobody_up(server, executor):
    def slow(_):
        time.sleep(0.05)
        page = {"kind": "JobList", "metadata": {"continue": f"page {len(server.asked)}"}}
        return json.dumps(page).encode()

    server.body = slow
    client = executor._client
    with (
        client.until(time.monotonic(), time.monotonic, 0.3),
        pytest.raises(UnavailableError, match="given up"),
    ):
        executor._cluster.list_runs("default", "a=b")
    assert len(server.asked) < 20


def read_short_log(cluster):
    return list(_client.pieces("read", cluster.open_log("default", "pod", endless=False)))


ASK = {
    "Job": lambda cluster: cluster.read_job("default", "run-1"),
    "log": read_short_log,
    "proxy": lambda cluster: cluster.read_job("default", "run-1"),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "answer",
    [
        {"body": b" " * 72_000},
        {"body": b" " * 72_000, "status": 403},
        {"raw": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 60_000},
        {"raw": b"HTTP/1.1 " + b"2" * 60_000},
        {"raw": b"HTTP/1.1 100 Continue\r\n\r\n" * 3000},
        {"raw": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 60_000},
    ],
    ids=["body", "refusal", "headers", "status", "continue", "chunk"],
)
@pytest.mark.parametrize("what", ASK)
def test_an_answer_that_drips_holds_nobody_up(tmp_path, answer, what):
    """Every byte comes in time, and the whole would take an hour."""
    with strange_server(drip=0.02, **answer) as server:
        config = kubeconfig(server.url if what != "proxy" else "https://cluster.example")
        if what == "proxy":
            config["clusters"][0]["cluster"]["proxy-url"] = server.url
            config["contexts"][0]["context"]["user"] = "me"
            config["users"] = [{"name": "me", "user": {"token": "x"}}]
        path = tmp_path / "config"
        path.write_text(json.dumps(config))
        with EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor:
            cluster, begin = executor._cluster, time.monotonic()
            with (
                executor._client.until(begin, time.monotonic, 0.5),
                pytest.raises(UnavailableError, match=r"comes too slowly|Tunnel connection failed"),
            ):
                ASK[what](cluster)
            assert time.monotonic() - begin < PATIENCE


def test_a_log_may_take_any_time_once_its_headers_are_here(server, executor):
    server.drip, server.body = 0.02, b"x" * 50
    with executor._client.until(time.monotonic(), time.monotonic, 0.5):
        log = executor._cluster.open_log("default", "pod")
        assert b"".join(_client.pieces("read a log", log)) == b"x" * 50
        with pytest.raises(UnavailableError, match="comes too slowly"):
            executor._cluster.read_job("default", "run-1")


_NO_LOG = b"unable to retrieve container logs for containerd://abc"


class TestLogs:
    """Only the cluster may say that a result in the log is lost: a journal keeps that for ever."""

    @pytest.fixture
    def read(self, executor, a_pod, report):
        message, lines = report({"table": "x" * 50_000})
        end = {"exitCode": 0, "message": message}
        pod = read_pod(a_pod(0, "Succeeded", {"terminated": end}))
        handle = ReplicaHandle(0, "eks", {"namespace": "default"}, run_id="run-1", world_size=1)
        self.lines = [f"2026-11-21T04:30:47Z {line}".encode() for line in lines]
        self.pods = [pod]
        return lambda: read_result(executor._cluster, handle, pod, lambda: self.pods)

    @pytest.mark.parametrize(
        ("code", "body"),
        [
            (404, b"<html>nginx</html>"),
            (404, refusal(name="run-1-1-abcde", kind="pods")),
            (404, refusal(name="a-node", kind="nodes")),
            (400, b"<html>is not available</html>"),
            (200, b"<html>log in</html>"),
            (200, b'{"kind": "Status"}'),
            (200, b""),
            (200, _NO_LOG),
            (200, b'failed to try resolving symlinks in path "/var/log/pods/x/0.log": lstat'),
            (200, b"rpc error: code = Unavailable desc = connection error: connection refused"),
        ],
    )
    def test_it_is_not_lost_for_a_proxy_or_a_node(self, server, read, code, body):
        server.status, server.body = code, body
        with pytest.raises(BackendError) as caught:
            read()
        assert not isinstance(caught.value, (ResultLostError, ReplicaNotFoundError))
        assert caught.value.retryable or code == 400
        server.status, server.body = 200, b"\n".join(self.lines)
        assert read() == {"table": "x" * 50_000}

    @pytest.mark.parametrize(
        ("code", "body"),
        [
            (404, refusal(name="run-1-0-abcde", kind="pods")),
            (404, refusal(name="run-1-0-abcde", kind="pods/log")),
            (200, b"2026-11-21T04:30:47Z something else"),
        ],
    )
    def test_it_is_lost_for_the_cluster(self, server, read, code, body):
        server.status, server.body = code, body
        with pytest.raises(ResultLostError, match="cannot be read"):
            read()

    @pytest.mark.parametrize("words", [_NO_LOG, b"rpc error: code = NotFound desc = container"])
    def test_it_is_lost_with_the_pod_that_held_it(self, server, read, words):
        server.body, pods = words, self.pods
        self.pods = [replace(pods[0], deleting=True)]
        with pytest.raises(ResultLostError, match="cannot be read: there is no log: "):
            read()
        self.pods = []
        with pytest.raises(ResultLostError, match="cannot be read: there is no log: "):
            read()

    def test_a_page_is_no_words_of_a_container_that_waits(self, server, executor):
        server.status, server.body = 400, b"<html>this service is not available</html>"
        source = LogSource(
            executor._cluster, "default", "u-1", 0, lambda: False, lambda: 0.0, Backoff(), 0.0
        )
        with pytest.raises(InvalidRequestError, match="not the cluster's own"):
            source.lines("run-1-0-abcde")


def test_a_page_with_403_is_no_policy_of_the_cluster(server, executor):
    server.status, server.body = 403, b"<html>denied</html>"
    with pytest.raises(ForbiddenError, match=r"denied.* not the cluster's own"):
        executor.list_runs()


def test_a_refusal_without_a_word_has_its_status(server, executor):
    server.body, server.status = b"", 502
    with pytest.raises(UnavailableError, match="cannot list Jobs in default: HTTP status 502"):
        executor.list_runs()


def test_of_an_objects_events_one_page_is_read(server, executor):
    server.body = json.dumps(
        {"kind": "EventList", "items": [], "metadata": {"continue": "more"}}
    ).encode()
    executor._cluster.list_events("default", "u-1")
    assert len(server.asked) == 1
    assert "limit=250" in server.asked[0][1]


@pytest.mark.parametrize("status", [200, 503])
def test_a_compressed_answer_is_not_unpacked(server, executor, status):
    """None is asked for, and not every urllib3 keeps a bound while it unpacks one."""
    server.body, server.status = gzip.compress(b'{"items": [], "message": "unpacked"}'), status
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(
        UnavailableError, match={200: "the answer is not JSON", 503: "cannot list Jobs"}[status]
    ):
        executor.list_runs()
    if status == 200:
        log = executor._cluster.open_log("default", "pod")
        assert b"".join(_client.pieces("read the log", log)) == server.body


def test_the_answer_to_a_delete_is_not_read_to_its_end(server, executor, monkeypatch):
    monkeypatch.setattr(_client, "_ANSWER_BYTES", 10_000)
    server.body = b"{" + b" " * 20_000 + b"}"
    with pytest.raises(BackendError, match="the answer is larger than 10000 bytes"):
        executor._cluster.delete_job("default", "run-1", "u-1")


def test_what_the_cluster_warns_of_is_logged_as_text(server, executor, caplog):
    said = "\x1b[2J https://user:hunter2@proxy.example/ " + "x" * 5000
    server.headers = {"Warning": f'299 - "{said}"'}
    server.body = found()
    with caplog.at_level(logging.WARNING, "diloco_eks"):
        create_job(executor._cluster, {"metadata": {"namespace": "default", "name": "run-1"}})
    (record,) = caplog.records
    assert r"run-1: \x1b[2J https://<redacted>@proxy.example/ xxx" in record.getMessage()
    assert len(record.getMessage()) < 1200


@pytest.mark.parametrize("status", [400, 422, 503])
def test_what_python_prints_of_an_error_has_no_secret_either(server, executor, status):
    said = "env DB_PASSWORD=hunter2 is refused by https://user:hunter2@hook.example/ \x1b[2J"
    server.body, server.status = json.dumps({"message": said}).encode(), status
    with pytest.raises(BackendError, match="DB_PASSWORD=<redacted> is refused") as caught:
        executor.list_runs()
    printed = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in printed
    assert "\x1b" not in printed


def test_the_size_of_a_chunk_has_an_end(server, executor):
    server.body, server.headers = b"0" * 200_000, {"Transfer-Encoding": "chunked"}
    log = executor._cluster.open_log("default", "pod")
    with pytest.raises(UnavailableError, match="cannot read the log"):
        list(_client.pieces("read the log", log))
