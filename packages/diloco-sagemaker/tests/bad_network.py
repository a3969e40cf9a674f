"""A network between boto3 and a stand-in that resets, cuts, misreports and throttles, by a seed."""

import http.client
import random
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FATES = ("reset", "lost", "cut", "error", "gateway", "throttle")
"""Request reset; answer lost; answer cut; an error of the service; of a proxy; throttled."""
SHARE = 0.3  # of the requests
LONGEST_STORM = 8  # requests of one kind, one after another, that are throttled
_JSON = "application/x-amz-json-1.1"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class BadNetwork:
    """A proxy on loopback; a request's fate depends on the seed, its kind, and how often it came.

    So the order in which requests of several threads arrive changes nothing.
    """

    def __init__(self, url):
        self.target = url.removeprefix("http://")
        self.lock = threading.Lock()
        self.calm()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def calm(self):
        """Nothing more goes wrong."""
        self.seed, self.asked, self.met = None, {}, []

    def disturb(self, seed):
        """Things go wrong from now on, as this seed says."""
        self.seed, self.asked, self.met = seed, {}, []

    def fate(self, what):
        """What becomes of a request; None: it is answered."""
        with self.lock:
            if self.seed is None:
                return None
            kind = what.split()[0]
            number = self.asked[what] = self.asked.get(what, 0) + 1
            storm = random.Random(f"{self.seed} {kind}").randrange(6 * LONGEST_STORM)
            draw = random.Random(f"{self.seed} {what} {number}")
            fate = draw.choice(FATES) if draw.random() < SHARE else None
            if number <= storm <= LONGEST_STORM:
                fate = "throttle"
            if fate is not None:
                self.met.append(f"{what}: {fate}")
            return fate

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def _handler(network):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or every second answer waits for an acknowledgement
        wbufsize = 1 << 16
        upstream = None

        def log_message(self, *_):
            pass

        def handle(self):
            try:
                super().handle()
            except ConnectionError:
                pass  # the client has gone
            finally:
                if self.upstream is not None:
                    self.upstream.close()

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            what = self.what(body)
            fate = network.fate(what)
            if isinstance(fate, tuple):
                self.answer(*fate)
            elif fate == "reset":
                self.reset()
            elif fate == "error":
                self.answer(500, _JSON, b'{"__type": "InternalFailure", "message": "internal"}')
            elif fate == "gateway":
                self.answer(502, "text/html", b"<html><h1>Bad Gateway</h1></html>")
            elif fate == "throttle":
                self.throttle(what)
            else:
                self.forward(body, fate)

        do_GET = do_PUT = do_DELETE = do_HEAD = do_POST

        def what(self, body):
            """What is asked for, and of what."""
            target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
            name = re.search(rb'"(?:TrainingJobName|logStreamName)": *"([^"]*)"', body)
            if target:
                return f"{target} {'' if name is None else name[1].decode()}"
            return (
                f"{self.command} "
                f"{self.path if 'x-id' in self.path or len(self.path) > 1 else 'sts'}"
            )

        def throttle(self, what):
            if what.startswith(("GET", "PUT", "DELETE", "HEAD")):
                text = (
                    b"<Error><Code>SlowDown</Code><Message>Reduce your request "
                    b"rate.</Message></Error>"
                )
                self.answer(503, "application/xml", text)
            elif what.startswith("POST"):
                text = (
                    b"<ErrorResponse><Error><Code>Throttling</Code><Message>Rate "
                    b"exceeded</Message></Error></ErrorResponse>"
                )
                self.answer(400, "text/xml", text)
            else:
                text = b'{"__type": "ThrottlingException", "message": "Rate exceeded"}'
                self.answer(400, _JSON, text)

        def forward(self, body, fate):
            if self.upstream is None:
                self.upstream = http.client.HTTPConnection(network.target, timeout=60)
            headers = {
                key: value for key, value in self.headers.items() if key.lower() != "connection"
            }
            self.upstream.request(self.command, self.path, body, headers)
            response = self.upstream.getresponse()
            content = response.read()
            if fate == "lost":
                self.reset()
                return
            self.send_response(response.status)
            for key, value in response.getheaders():
                if key.lower() not in _HOP_BY_HOP:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fate == "cut" and content:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(content)

        def answer(self, status, kind, content, headers=()):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def reset(self):
            """The other side gets a reset, not an orderly end."""
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True

    return Handler
