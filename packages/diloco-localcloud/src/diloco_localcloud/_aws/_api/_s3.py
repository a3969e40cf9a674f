"""S3, by moto: objects in memory, with conditional writes."""

from __future__ import annotations

import importlib.util
import threading
import urllib.parse
from typing import TYPE_CHECKING, Any

from ..._server._errors import StandInError
from ..._server._http import Response

if TYPE_CHECKING:
    from ..._server._http import Request

_OF_OBJECTS = {
    "GET": "GetObject",
    "HEAD": "HeadObject",
    "PUT": "PutObject",
    "DELETE": "DeleteObject",
}
_OF_BUCKETS = {
    "GET": "ListObjects",
    "HEAD": "HeadBucket",
    "PUT": "CreateBucket",
    "DELETE": "DeleteBucket",
}
# What the server writes by itself.
_OWN_HEADERS = {"connection", "content-type", "date", "server"}


def operation(request: Request) -> str:
    """The operation of a request; for those that are rare, the method."""
    _, _, key = request.path.lstrip("/").partition("/")
    return (_OF_OBJECTS if key else _OF_BUCKETS).get(request.method, request.method)


class S3:
    """Hands requests on to moto, which keeps one world per process: stand-ins that run at a time share their buckets."""

    def __init__(self) -> None:
        # One at a time: moto fails where one key is written by two at once.
        self._lock = threading.Lock()
        self._app: Any = None

    @staticmethod
    def check() -> None:
        """Raise StandInError if moto is not there. It is imported only when it is needed, since that takes a second."""
        if any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")):
            raise StandInError(
                "S3 needs packages that are not here; install diloco-localcloud with its extra: diloco-localcloud[aws]"
            )

    def answer(self, request: Request) -> Response:
        """Moto's answer."""
        from werkzeug.test import EnvironBuilder, run_wsgi_app

        with self._lock:
            if self._app is None:
                from moto.server import DomainDispatcherApplication, create_backend_app

                self._app = DomainDispatcherApplication(create_backend_app)
            path = urllib.parse.quote(request.path, safe="/~")
            builder = EnvironBuilder(
                path,
                f"http://{request.headers.get('host', '127.0.0.1')}",
                request.raw_query,
                method=request.method,
                headers=list(request.headers.items()),
                data=request.body,
            )
            try:
                parts, status, headers = run_wsgi_app(
                    self._app, builder.get_environ(), buffered=True
                )
                body = b"".join(parts)
            finally:
                builder.close()
        kept = {key: value for key, value in headers.items() if key.lower() not in _OWN_HEADERS}
        if request.method != "HEAD":
            kept.pop("Content-Length", None)
        code = int(status.split(" ", 1)[0])
        return Response(code, body, headers.get("Content-Type", "application/xml"), kept)

    def write(self, bucket: str, key: str, data: bytes) -> bool:
        """Put an object, as SageMaker does for a job; False if there is no such bucket."""
        with self._lock:
            backend = self._backend()
            if bucket not in backend.buckets:
                return False
            backend.put_object(bucket, key, data)
            return True

    def read(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """The objects below a prefix by their keys; none if there is no such bucket."""
        with self._lock:
            found = self._backend().buckets.get(bucket)
            if found is None:
                return {}
            return {key: found.keys[key].value for key in found.keys if key.startswith(prefix)}

    @staticmethod
    def _backend() -> Any:
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def forget(self) -> None:
        """Drop all buckets."""
        with self._lock:
            if self._app is not None:
                from moto.s3.models import s3_backends

                s3_backends.reset()
                self._app = None
