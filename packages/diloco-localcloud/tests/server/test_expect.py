"""Clients that ask before they send a body, as those of S3 do."""

from __future__ import annotations

import socket

from standin_lab import PATIENCE

from diloco_localcloud._server._http import Response, Server


def test_a_client_that_asks_first_is_told_to_go_on():
    server = Server(lambda request: Response(200, request.body), 0, None)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(
                b"PUT /k HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
            )
            assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"body")
            with connection.makefile("rb") as answer:
                assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
    finally:
        server.stop()
