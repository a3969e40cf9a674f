"""What clients can make a stand-in hold: nothing before they say who they are, never too much."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
import tracemalloc

import pytest
import websockets.sync.client

from diloco_localcloud import KubernetesStandIn
from diloco_localcloud._server._http import Response, Server
from diloco_localcloud._server._websocket import Talk

PATIENCE = 600.0


@contextlib.contextmanager
def serving(handle=lambda request: Response(200, request.body, "text/plain"), **options):
    server = Server(handle, 0, None, **options)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def answer(connection):
    """The status and the body of one answer, read to the end of the connection or of the body."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, file.read(int(headers.get("content-length", "0")))


def head(length, path="/", method="POST", **headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class TestKubernetes:
    @pytest.fixture
    def stand_in(self):
        with KubernetesStandIn(tls=False) as stand_in:
            yield stand_in

    def port(self, stand_in):
        return int(stand_in.url.rsplit(":", 1)[1])

    def test_who_is_unknown_is_refused_before_the_body_is_read(self, stand_in):
        """Nothing of the body has been sent when the answer comes."""
        with connect(self.port(stand_in)) as connection:
            connection.sendall(head(1 << 40, "/api/v1/namespaces/default/pods"))
            status, headers, body = answer(connection)
        assert (status, headers["connection"]) == (401, "close")
        assert json.loads(body)["reason"] == "Unauthorized"
        assert [(call.verb, call.resource, call.status) for call in stand_in.calls] == [
            ("create", "pods", 401)
        ]

    @pytest.mark.parametrize("path", ["/{}", "/api/v1/namespaces/n/pods/{}"])
    def test_of_who_is_unknown_no_words_are_kept(self, stand_in, path):
        with connect(self.port(stand_in)) as connection:
            connection.sendall(head(0, path.format("n" * 10_000)))
            assert answer(connection)[0] == 401
        (call,) = stand_in.calls
        assert (call.name, call.resource in {"", "pods"}) == ("", True)

    def test_who_has_sent_its_body_already_reads_the_refusal(self, stand_in):
        """Closing with unread bytes would reset the connection, and the answer would be lost."""
        with connect(self.port(stand_in)) as connection:
            connection.sendall(head(3 << 20, "/api/v1/namespaces/default/pods") + b"x" * (3 << 20))
            assert answer(connection)[0] == 401
            assert connection.recv(1) == b""

    def test_a_body_that_is_too_large_is_refused_unread(self, stand_in):
        with connect(self.port(stand_in)) as connection:
            token = f"Bearer {stand_in.token}"
            path = "/apis/batch/v1/namespaces/default/jobs"
            connection.sendall(head((3 << 20) + 1, path, Authorization=token))
            status, _, body = answer(connection)
        assert status == 413
        assert json.loads(body)["message"] == "Request entity too large: limit is 3145728"

    def test_health_is_told_to_everybody(self, stand_in):
        with connect(self.port(stand_in)) as connection:
            connection.sendall(head(0, "/healthz", "GET"))
            assert answer(connection)[0] == 200

    @pytest.mark.parametrize("path", ["/healthz", "/version"])
    def test_no_body_is_read_for_everybody(self, stand_in, path):
        with connect(self.port(stand_in)) as connection:
            connection.sendall(head(3 << 20, path))
            assert answer(connection)[0] == 401

    @pytest.mark.parametrize("token", ["", "Bearer", "Bearer é", "Bearer x"])
    def test_other_tokens(self, stand_in, token):
        with connect(self.port(stand_in)) as connection:
            connection.sendall(head(0, "/api/v1/pods", "GET", Authorization=token))
            assert answer(connection)[0] == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": "x"}, 400),
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "9" * 40}, 400),
        ({"Content_Length": "9" * 5000}, 400),
        ({"Transfer_Encoding": "chunked"}, 411),
    ],
)
def test_a_body_of_unknown_length_is_refused(capsys, headers, status):
    """It was taken for an empty one."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with serving() as port, connect(port) as connection:
        connection.sendall(("POST / HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection)[0] == status
        assert connection.recv(1) == b""
    assert capsys.readouterr().err == ""


def test_a_refused_body_takes_no_memory():
    refuse = Response(403, b"no", "text/plain")
    message = head(4 << 20) + b"x" * (4 << 20)
    with serving(admit=lambda head: refuse) as port, connect(port) as connection:
        tracemalloc.start()
        try:
            connection.sendall(message)
            assert answer(connection)[0] == 403
            assert connection.recv(1) == b""
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 1 << 20


def test_a_silent_client_is_let_go():
    with serving(idle_seconds=0.05) as port:
        with connect(port) as connection:
            assert connection.recv(1) == b""
        with connect(port) as connection:
            connection.sendall(head(10) + b"half")
            assert connection.recv(1) == b""


def test_a_silent_command_is_not_ended():
    """Over a WebSocket, both sides may be silent for as long as a command runs."""

    def echo(web_socket):
        while (messages := web_socket.receive()) is not None:
            for message in messages:
                web_socket.send(message)

    talk = Response(101, b"", talk=Talk(("plain",), echo))
    with (
        serving(lambda request: talk, idle_seconds=0.01) as port,
        websockets.sync.client.connect(f"ws://127.0.0.1:{port}", subprotocols=["plain"]) as client,
    ):
        time.sleep(0.2)  # only a server that is wrong does something meanwhile
        client.send(b"still there?")
        assert client.recv() == b"still there?"


def test_there_are_only_so_many_connections():
    entered, leave = threading.Semaphore(0), threading.Event()

    def handle(request):
        entered.release()
        leave.wait(PATIENCE)
        return Response(200, b"", "text/plain")

    with serving(handle, most_connections=2) as port, contextlib.ExitStack() as open_ones:
        first = [open_ones.enter_context(connect(port)) for _ in range(2)]
        for connection in first:
            connection.sendall(head(0))
            assert entered.acquire(timeout=PATIENCE)
        with connect(port) as third:
            assert third.recv(1) == b"", "closed at once, and not left waiting"
        leave.set()
        for connection in first:
            assert answer(connection)[0] == 200
            connection.close()
        for _ in range(100_000):  # there is room again, as soon as the server has noticed
            with connect(port) as later, contextlib.suppress(ConnectionError, IndexError):
                later.sendall(head(0))
                if answer(later)[0] == 200:
                    break
        else:
            pytest.fail("there is no room again, although two connections were closed")


class TestHeads:
    def test_a_head_is_bounded(self):
        """Each line is short enough, and there are not too many, but together they are too much."""
        with serving() as port, connect(port) as connection:
            line = b"A: " + b"x" * 60_000 + b"\r\n"
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\n" + line * 40 + b"\r\n")
            assert answer(connection)[0] == 431

    def test_the_next_request_may_have_as_much_again(self):
        more = {f"A{number}": "x" * 60_000 for number in range(10)}
        with serving() as port, connect(port) as connection:
            for _ in range(3):
                connection.sendall(head(0, **more))
                assert answer(connection)[0] == 200

    def test_a_path_that_is_no_path(self):
        with serving() as port, connect(port) as connection:
            connection.sendall(head(0, "http://[x/"))
            assert answer(connection)[0] == 400

    def test_nobody_is_told_to_go_on_before_he_is_admitted(self):
        refuse = Response(401, b"no", "text/plain")
        with serving(admit=lambda head: refuse) as port, connect(port) as connection:
            connection.sendall(head(4, Expect="100-continue"))
            assert answer(connection)[0] == 401


class TestBodies:
    def test_what_is_announced_takes_no_memory(self):
        with serving() as port, connect(port) as connection:
            tracemalloc.start()
            try:
                connection.sendall(head(10**14) + b"begin")
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < 1 << 20

    def test_half_a_body_is_not_handled(self):
        handled = []

        def handle(request):
            handled.append(request)
            return Response(200, b"")

        with serving(handle) as port, connect(port) as connection:
            connection.sendall(head(10) + b"half")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        assert handled == []


@pytest.mark.parametrize("begin", [b"", b"POST / HTTP/1.1\r\nSlow: y", head(10) + b"half"])
def test_slow_clients_keep_nobody_out(begin):
    """Those that have not said who they are give way to a new one."""
    refuse = Response(401, b"", "text/plain")
    admit = lambda head: None if head.headers.get("who") == "me" else refuse  # noqa: E731
    with serving(admit=admit, most_connections=3) as port, contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(connect(port)) for _ in range(3)]
        for connection in slow:
            connection.sendall(begin)
        for _ in range(3):
            mine = open_ones.enter_context(connect(port))
            mine.sendall(head(0, Who="me"))
            assert answer(mine)[0] == 200


def test_a_slow_handshake_keeps_nobody_out():
    with KubernetesStandIn(tls=True) as stand_in:
        stand_in._server._inner.most_connections = 2
        port = int(stand_in.url.rsplit(":", 1)[1])
        context = ssl.create_default_context(cadata=stand_in.authority)
        with (
            connect(port),
            connect(port),
            connect(port) as mine,
            context.wrap_socket(mine, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(head(0, "/healthz", "GET"))
            assert answer(connection)[0] == 200
