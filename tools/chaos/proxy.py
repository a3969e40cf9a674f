"""A proxy before S3 that makes requests fail in every known way, and tells a history of it.

Path-style addressing, one bucket. All clients must go through it: it knows what was written when.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from faults import Fault, Faults

if TYPE_CHECKING:
    from history import History

_STALE_SECONDS = 1.0
_CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class FaultProxy:
    """``with FaultProxy(upstream, faults) as proxy`` serves ``proxy.url``.

    Args:
        upstream: URL of the S3 behind it.
        faults: What goes wrong.
        prefix: Of which keys a history is told, with ``/`` at the end.
        history: Who is told; its keys are relative to the prefix.
    """

    def __init__(self, upstream: str, faults: Faults, prefix: str, history: History) -> None:
        self.faults = faults
        self.requests = 0
        self.upstream = urlsplit(upstream).netloc
        self._prefix = prefix
        self._history = history
        self.writing = (
            threading.Lock()
        )  # so that what is recorded is in the order in which it was applied
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._changes: list[tuple[float, str, bool, int]] = []

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wrote(self, key: str, data: bytes) -> None:
        """An object was written."""
        with self._lock:
            fresh = key not in self._objects
            self._objects[key] = data
            if fresh:
                self._changes.append((time.monotonic(), key, True, len(data)))
            if key.startswith(self._prefix):
                self._history.wrote(key.removeprefix(self._prefix), data)

    def removed(self, key: str) -> None:
        """An object was deleted."""
        with self._lock:
            data = self._objects.pop(key, None)
            if data is None:
                return
            self._changes.append((time.monotonic(), key, False, len(data)))
            if key.startswith(self._prefix):
                own = key.removeprefix(self._prefix)
                sync = own.split("/")[1] if own.startswith("deltas/") else ""
                commit = self._objects.get(f"{self._prefix}commits/{sync}.json")
                self._history.removed(own, commit)

    def a_second_ago(self, body: bytes, prefix: str) -> bytes:
        """A listing without the last second's new objects, and with those deleted in it."""
        limit = time.monotonic() - _STALE_SECONDS
        with self._lock:
            while self._changes and self._changes[0][0] < limit - _STALE_SECONDS:
                self._changes.pop(0)
            recent = [change for change in self._changes if change[0] >= limit]
        first = {}
        for _, key, appeared, size in recent:
            first.setdefault(
                key, (appeared, size)
            )  # what the first change in this second undid was there before it
        kept = {
            unescape(_KEY.search(part)[1].decode()): part  # type: ignore[index]
            for part in _CONTENTS.findall(body)
        }
        for key, (appeared, size) in first.items():
            if appeared:
                kept.pop(key, None)
            elif key.startswith(prefix):
                kept[key] = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>e</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                ).encode()
        start = _CONTENTS.search(body)
        at = start.start() if start else body.rindex(b"</ListBucketResult>")
        rest = _CONTENTS.sub(b"", body)
        return rest[:at] + b"".join(kept[key] for key in sorted(kept)) + rest[at:]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: FaultProxy

    def setup(self) -> None:
        super().setup()
        self.link = http.client.HTTPConnection(self.proxy.upstream, timeout=120)

    def finish(self) -> None:
        self.link.close()
        super().finish()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(split.query, keep_blank_values=True).items()
        }
        key = unquote(split.path).lstrip("/").partition("/")[2]
        listing = self.command == "GET" and not key
        conditional = self.headers.get("If-None-Match") == "*"
        faults = self.proxy.faults
        self.proxy.requests += 1
        probe = "probes/" in unquote(self.path)
        fault = faults.choose(self.command, conditional=conditional, listing=listing, probe=probe)
        if fault is Fault.SLOW:
            faults.happened(fault)
            time.sleep(faults.uniform(0.05, 1.0))
        if fault in {Fault.CONFLICT, Fault.ERROR}:
            faults.happened(fault)
            return self.refuse(fault)
        if fault is Fault.RESET:
            faults.happened(fault)
            return self.reset()
        with self.proxy.writing if self.command != "GET" else contextlib.nullcontext():
            status, headers, answer = self.forward(body)
            applied = 200 <= status < 300
            if applied:
                self.record(key, query, body)
        if (
            fault is Fault.LOST
            or (fault is Fault.ERROR_AFTER and applied)
            or (fault is Fault.EXISTS and applied)
        ):
            faults.happened(fault)
            return self.reset() if fault is Fault.LOST else self.refuse(fault)
        if applied and answer and self.command == "GET":
            if fault is Fault.STALE:
                faults.happened(fault)
                answer = self.proxy.a_second_ago(answer, query.get("prefix", ""))
            if fault is Fault.FLIPPED:
                faults.happened(fault)
                flipped = bytearray(answer)
                flipped[faults.below(len(flipped))] ^= 1 << faults.below(8)
                answer = bytes(flipped)
            if fault is Fault.TRUNCATED:
                faults.happened(fault)
                self.answer(
                    status, headers, answer[: faults.below(len(answer))], length=len(answer)
                )
                return self.reset()
        return self.answer(status, headers, answer)

    # Names of the base class
    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    def forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the S3 behind; a connection that it has closed in the meantime is opened again."""
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in {"connection", "expect"}
        }
        self.link.request(self.command, self.path, body=body or None, headers=headers)
        response = self.link.getresponse()
        answer = response.read()
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP]
        if self.command == "HEAD":
            kept.append(("Content-Length", response.getheader("Content-Length") or "0"))
        if response.will_close:
            self.link.close()
        return response.status, kept, answer

    def record(self, key: str, query: dict[str, str], body: bytes) -> None:
        """Tell the proxy what was applied.

        Runs hold no objects so large that they would be uploaded in parts.
        """
        if self.command == "PUT" and "uploadId" not in query:
            self.proxy.wrote(key, body)
        elif self.command == "DELETE" and "uploadId" not in query:
            self.proxy.removed(key)
        elif self.command == "POST" and "delete" in query:
            for name in _KEY.findall(body):
                self.proxy.removed(unescape(name.decode()))
        elif self.command == "POST":
            raise NotImplementedError(
                "this proxy does not follow uploads in parts; let the run have smaller objects"
            )

    def refuse(self, fault: Fault) -> None:
        status, code = {
            Fault.CONFLICT: (409, "ConditionalRequestConflict"),
            Fault.EXISTS: (412, "PreconditionFailed"),
        }.get(fault) or (
            (503, "SlowDown") if self.proxy.faults.below(2) else (500, "InternalError")
        )
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.answer(status, [("Content-Type", "application/xml")], text)

    def answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body) if length is None else length))
        elif not any(name == "Content-Length" for name, _ in headers):
            self.send_header("Content-Length", "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
