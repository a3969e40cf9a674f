"""Where blobs are sent and fetched: plain HTTP beside gRPC."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ..._server._http import Request, Response, Server

if TYPE_CHECKING:
    from .._workspace._workspace import Workspace


class Blobs:
    """Keeps what is sent, from ``start`` to ``stop``. Who knows the id of a blob may fetch it, as with a presigned URL."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._server = Server(self._handle, 0, None)

    def start(self) -> None:
        """Begin to listen."""
        self._server.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop()

    def url(self, blob_id: str) -> str:
        """Where a blob is sent to and fetched from."""
        return f"http://127.0.0.1:{self._server.port}/blobs/{blob_id}"

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
