"""S3, served by moto: objects in memory, with conditional writes."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from ..._server._errors import StandInError
from ..._server._http import Request, Response

_METHODS = ("GET", "HEAD", "PUT", "DELETE")
_OF_OBJECTS = ("GetObject", "HeadObject", "PutObject", "DeleteObject")
_OF_BUCKETS = ("ListObjects", "HeadBucket", "CreateBucket", "DeleteBucket")
# The headers that the server writes by itself.
_OWN_HEADERS = {"connection", "content-type", "date", "server"}


def operation(request: Request) -> str:
    """Return the operation of a request, or its HTTP method if the operation is a rare one."""
    _, _, key = request.path.lstrip("/").partition("/")
    names = dict(zip(_METHODS, _OF_OBJECTS if key else _OF_BUCKETS, strict=True))
    return names.get(request.method, request.method)


# Moto keeps one set of buckets per process; each request swaps in the buckets of its stand-in. Moto
# also fails if two threads write one key at once.
_MOTO = threading.Lock()


class S3:
    """Hands requests on to moto, with buckets of its own.

    Neither other stand-ins nor other users of moto in this process see these buckets.
    """

    def __init__(self) -> None:
        self._app: Any = None
        self._backends: dict[str, Any] = {}
        self._owners: dict[str, Any] = {}

    @staticmethod
    def check() -> None:
        """Raise StandInError if moto is not installed.

        It does not import moto, since that takes a second; the first request does.
        """
        if any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")):
            raise StandInError(
                "S3 needs packages that are not here; install diloco-localcloud with its extra: "
                "diloco-localcloud[aws]"
            )

    def answer(self, request: Request) -> Response:
        """Return moto's answer to a request."""
        from werkzeug.test import EnvironBuilder, run_wsgi_app

        with self._world():
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

    def create(self, bucket: str, region: str) -> None:
        """Create a bucket."""
        with self._world() as backend:
            backend.create_bucket(bucket, region)

    def write(self, bucket: str, key: str, data: bytes) -> bool:
        """Put an object, as SageMaker does for a job; return False if there is no such bucket."""
        with self._world() as backend:
            if bucket not in backend.buckets:
                return False
            backend.put_object(bucket, key, data)
            return True

    def read(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Return the objects below a prefix by their keys; none if there is no such bucket."""
        with self._world() as backend:
            found = backend.buckets.get(bucket)
            if found is None:
                return {}
            return {key: found.keys[key].value for key in found.keys if key.startswith(prefix)}

    @contextlib.contextmanager
    def _world(self) -> Iterator[Any]:
        """Swap these buckets into moto, for one request at a time."""
        with _MOTO:
            from moto.core import DEFAULT_ACCOUNT_ID
            from moto.s3.models import s3_backends

            others = dict(s3_backends.items()), s3_backends.bucket_accounts
            _put(s3_backends, self._backends, self._owners)
            try:
                yield s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
            finally:
                self._backends = dict(s3_backends.items())
                _put(s3_backends, *others)

    def forget(self) -> None:
        """Drop all buckets; moto's own reset would also close the files of other users of moto."""
        if not self._backends:
            return
        with self._world() as backend:
            for bucket in backend.buckets.values():
                for item in (*bucket.keys.values(), *bucket.multiparts.values()):
                    if hasattr(item, "dispose"):  # the marker of a deleted version has no file
                        item.dispose()
        self._app, self._backends, self._owners = None, {}, {}


def _put(s3_backends: Any, backends: dict[str, Any], owners: dict[str, Any]) -> None:
    s3_backends.clear()
    s3_backends.update(backends)
    s3_backends.bucket_accounts = owners
