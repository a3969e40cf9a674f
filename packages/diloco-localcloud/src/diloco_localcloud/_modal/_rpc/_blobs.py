"""The place where blobs are sent and fetched: plain HTTP beside gRPC."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from ..._server._http import Request, Response, Server
from .._workspace._workspace import Workspace

# A stand-in keeps blobs in memory.
_MOST_BYTES = 1 << 30


class Blobs:
    """The blobs that clients send, served from ``start`` to ``stop``.

    The URL of a blob is signed for one method, like the presigned URL of a bucket: a client
    without it can neither send nor fetch the blob.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._secret = secrets.token_bytes(32)
        self._server = Server(self._handle, 0, None, admit=self._admit)

    def start(self) -> None:
        """Begin to listen."""
        self._server.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop()

    def url(self, blob_id: str, method: str) -> str:
        """Return the URL where a blob is sent to (``"PUT"``) or fetched from (``"GET"``)."""
        path = f"/blobs/{blob_id}"
        signature = self._signature(method, path)
        return f"http://127.0.0.1:{self._server.port}{path}?signature={signature}"

    def _signature(self, method: str, path: str) -> str:
        return hmac.new(self._secret, f"{method} {path}".encode(), hashlib.sha256).hexdigest()

    def _admit(self, request: Request) -> Response | None:
        """Return the refusal of a wrong signature or of too large a body, which is not read."""
        sent = request.query.get("signature", "").encode()
        right = self._signature(request.method, request.path).encode()
        if not hmac.compare_digest(sent, right):
            return Response(403, b"the signature of this URL is not for this request", "text/plain")
        if int(request.headers.get("content-length", "0")) > _MOST_BYTES:
            return Response(413, b"a blob of a stand-in has at most 1 GiB", "text/plain")
        return None

    def _handle(self, request: Request) -> Response:
        blob_id = request.path.rpartition("/")[2]
        with self._workspace.lock:
            if request.method == "PUT":
                self._workspace.blobs[blob_id] = request.body
            data = self._workspace.blobs.get(blob_id)
        if data is None:
            return Response(404, b"there is no such blob", "text/plain")
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        body = data if request.method == "GET" else b""
        return Response(200, body, "application/octet-stream", {"ETag": f'"{etag}"'})
