"""A small S3 over HTTP that, unlike moto, ignores conditions, fails, conflicts, loses answers.

One bucket, ``bucket``; path-style addressing; no signatures are checked. Every request is in
``log``, ``served`` counts the bytes of all answers, and ``largest`` those of the largest one.
``faults`` is a list of :class:`Fault`, each used up by the first requests that it fits. Where there
is a ``gate``, readings and deletions are answered only when so many are under way at once; with
``gated``, a method and a part of the path, those requests instead.
"""

import hashlib
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Fault:
    """What goes wrong: an HTTP status, or ``drop`` (nothing happens, no answer), ``lose`` (it
    happens, no answer), ``cut`` (the connection ends in the middle of the body), ``flip`` (the
    first byte of the body is another), ``late`` (it happens, and the answer is an error with status
    200), ``never`` (the same, and it does not happen) or ``kept`` (nothing is deleted, which only
    the body of the answer says).
    """

    what: int | str
    method: str
    times: int = 1
    part: str = ""
    code: str = "Injected"


@dataclass
class SmallS3:
    """The server; ``with SmallS3() as server`` starts and stops it."""

    conditions: bool = True
    says_which: bool = True
    page: int = 1000
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    every: int = 0
    disturbed: int = 0
    served: int = 0
    largest: int = 0
    gate: threading.Barrier | None = None
    gated: tuple[str, str] | None = None
    allowed: Callable[[Mapping[str, str]], tuple[int, str] | None] = lambda headers: None
    """Given the headers of a request, returns the status and the code with which it is refused;
    None if it is not.
    """
    pages: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    """What else is served: a path without its query, and its content."""

    def __enter__(self):
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"s3": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *details):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def reset(self):
        with self.lock:
            self.allowed = lambda headers: None
            self.says_which = True
            self.conditions, self.page = True, 1000
            self.every = self.disturbed = self.served = self.largest = 0
            self.gate = self.gated = None
            for kept in (self.objects, self.faults, self.log, self.uploads, self.pages):
                kept.clear()

    def fail(self, what, method, times=1, part="", code="Injected"):
        self.faults.append(Fault(what, method, times, part, code))

    def disturb(self, every, kinds):
        """From now on, one of so many requests goes wrong."""
        self.every, self.kinds = every, kinds

    def fault(self, method, path):
        wanted, part = self.gated or ("GET HEAD DELETE", "")
        if self.gate is not None and method in wanted and part in path:
            self.gate.wait(600)  # or a test hangs that waits for more than come
        with self.lock:
            self.log.append((method, path))
            if self.every and len(self.log) % self.every == 0:
                self.disturbed += 1
                return Fault(self.kinds[self.disturbed % len(self.kinds)], method)
            for fault in self.faults:
                if fault.times and fault.method == method and fault.part in path:
                    fault.times -= 1
                    return fault
        return None

    def store(self, key, data, condition):
        """Return whether the object was written."""
        with self.lock:
            if condition == "*" and self.conditions and key in self.objects:
                return False
            self.objects[key] = data
            return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the client's delayed acknowledgement costs 40 ms per answer
    s3: SmallS3

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:  # the client has gone
            self.close_connection = True

    def log_message(self, *details):
        pass

    def answer(self, status, body=b"", **headers):
        if self.fault_is("flip"):
            body = bytes([body[0] ^ 1]) + body[1:]
        if self.fault_is("lose"):
            self.close_connection = True
            return
        if self.fault_is("late"):
            status, body = 200, _error(self.current.code)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(headers.get("length", len(body))))
        self.end_headers()
        if self.command != "HEAD":
            if self.fault_is("cut"):
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            else:
                with self.s3.lock:  # before the client can know
                    self.s3.served += len(body)
                    self.s3.largest = max(self.s3.largest, len(body))
                self.wfile.write(body)

    def refuse(self, status, code):
        # AWS and moto say which condition failed; other servers do not.
        which = code == "PreconditionFailed" and self.s3.says_which
        condition = "<Condition>If-None-Match</Condition>" if which else ""
        self.answer(status, _error(code, condition))

    def fault_is(self, *kinds):
        return self.current is not None and self.current.what in kinds

    def handle_any(self):
        split = urlsplit(self.path)
        self.query = {
            name: value[0] for name, value in parse_qs(split.query, keep_blank_values=True).items()
        }
        bucket, _, self.key = unquote(split.path).lstrip("/").partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.current = None
        if split.path in self.s3.pages:
            self.answer(200, self.s3.pages[split.path](), Content_Type="application/json")
            return
        self.current = self.s3.fault(self.command, self.path)
        refusal = self.s3.allowed(self.headers)
        if refusal is not None:
            self.refuse(*refusal)
        elif self.fault_is("drop"):
            self.close_connection = True
        elif self.fault_is("never"):
            self.answer(200, _error(self.current.code))
        elif self.current is not None and isinstance(self.current.what, int):
            self.refuse(self.current.what, self.current.code)
        elif bucket != "bucket":
            self.refuse(404, "NoSuchBucket")
        else:
            getattr(self, self.command.lower())()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def put(self):
        if "uploadId" in self.query:
            with self.s3.lock:
                parts = self.s3.uploads.get(self.query["uploadId"])
                if parts is not None:
                    parts[int(self.query["partNumber"])] = self.body
            if parts is None:  # given up by the client, whose other connections are still at it
                return self.refuse(404, "NoSuchUpload")
            self.answer(200, ETag=_etag(self.body))
        elif self.s3.store(self.key, self.body, self.headers.get("If-None-Match")):
            self.answer(200, ETag=_etag(self.body))
        else:
            self.refuse(412, "PreconditionFailed")
        return None

    def get(self):
        if not self.key:
            return self.list()
        data = self.s3.objects.get(self.key)
        if data is None:
            return self.refuse(404, "NoSuchKey")
        headers = {
            "ETag": _etag(data),
            "Last_Modified": formatdate(usegmt=True),
            "Accept_Ranges": "bytes",
        }
        wanted = self.headers.get("Range")
        if not wanted:
            return self.answer(200, data, **headers)
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return self.refuse(416, "InvalidRange")
        part = data[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.answer(206, part, Content_Range=span, **headers)

    def head(self):
        data = self.s3.objects.get(self.key)
        if data is None:
            return self.answer(404)
        return self.answer(
            200, ETag=_etag(data), Last_Modified=formatdate(usegmt=True), length=len(data)
        )

    def delete(self):
        with self.s3.lock:
            if "uploadId" in self.query:
                self.s3.uploads.pop(self.query["uploadId"], None)
            else:
                self.s3.objects.pop(self.key, None)
        self.answer(204)

    def post(self):
        if "uploads" in self.query:
            with self.s3.lock:
                number = f"upload-{len(self.s3.log)}"
                self.s3.uploads[number] = {}
            return self.answer(
                200, _xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
            )
        if "delete" in self.query:
            keys = [
                each.text for each in ET.fromstring(self.body).iter() if each.tag.endswith("Key")
            ]
            if self.fault_is("kept"):
                said = "".join(
                    f"<Error><Key>{escape(key)}</Key><Code>{self.current.code}</Code>"
                    "<Message>no, said the store</Message></Error>"
                    for key in keys
                )
                return self.answer(200, _xml("DeleteResult", said))
            with self.s3.lock:
                for key in keys:
                    self.s3.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return self.answer(200, _xml("DeleteResult", deleted))
        with self.s3.lock:
            parts = self.s3.uploads.pop(self.query["uploadId"], None)
        if parts is None:
            return self.refuse(404, "NoSuchUpload")
        data = b"".join(parts[number] for number in sorted(parts))
        if not self.s3.store(self.key, data, self.headers.get("If-None-Match")):
            return self.refuse(412, "PreconditionFailed")
        said = f"<Key>{escape(self.key)}</Key><ETag>{escape(_etag(data))}</ETag>"
        return self.answer(200, _xml("CompleteMultipartUploadResult", said))

    def list(self):
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        with self.s3.lock:
            found = sorted(key for key in self.s3.objects if key.startswith(prefix) and key > after)
            page = {key: len(self.s3.objects[key]) for key in found[: self.s3.page]}
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in page.items()
        )
        more = len(found) > len(page)
        token = (
            f"<NextContinuationToken>{escape(max(page))}</NextContinuationToken>" if more else ""
        )
        counts = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        self.answer(200, _xml("ListBucketResult", counts + token + contents))


def _error(code, more=""):
    return f"<Error><Code>{code}</Code><Message>no, said the store</Message>{more}</Error>".encode()


def _etag(data):
    return f'"{hashlib.md5(data).hexdigest()}"'


def _xml(name, content):
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<?xml version="1.0"?><{name} xmlns="{space}">{content}</{name}>'.encode()
