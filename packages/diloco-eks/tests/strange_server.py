"""A server that records requests and gives a test's answers: a proxy, or no API server at all."""

import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class StrangeServer:
    """What it answers, perhaps to a path, and what it was asked: (method, path, headers)."""

    url: str = ""
    status: int = 200
    body: bytes = b'{"kind": "JobList", "items": []}'
    drip: float = 0.0  # seconds before every byte of the body
    raw: bytes = b""  # the whole answer in place of all else; every byte of it drips
    breaks: bool = False  # the connection, behind the body
    headers: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)


@contextmanager
def strange_server(**answer):
    """A server on this machine, as long as the context lasts."""
    strange = StrangeServer(**answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            strange.asked.append((self.command, self.path, self.headers))
            if strange.raw:
                for byte in strange.raw:
                    time.sleep(strange.drip)
                    self.wfile.write(bytes([byte]))
                return
            body = strange.body(self.path) if callable(strange.body) else strange.body
            self.send_response(strange.status)
            self.send_header("Content-Type", "application/json")
            if strange.breaks:
                self.send_header("Transfer-Encoding", "chunked")
                body = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            else:
                self.send_header("Content-Length", str(len(body)))
            for header in strange.headers.items():
                self.send_header(*header)
            self.end_headers()
            for piece in (body,) if not strange.drip else (bytes([byte]) for byte in body):
                time.sleep(strange.drip)
                self.wfile.write(piece)

        do_POST = do_PATCH = do_DELETE = do_GET

        def do_CONNECT(self):
            return self.do_GET() if strange.raw else self.send_error(501)

        def handle(self):
            with suppress(ConnectionError):
                super().handle()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    strange.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield strange
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
