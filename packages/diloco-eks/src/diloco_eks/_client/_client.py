"""Calls to the cluster, with the protocol's errors and renewed credentials.

They go over the connections of the client library, which differ less between its versions than its
classes for single calls.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlencode, urlsplit

from diloco_protocol import (
    AuthError,
    BackendError,
    InvalidRequestError,
    MissingDependencyError,
    UnavailableError,
)
from diloco_protocol.backend import in_time, read_bounded, redact_and_cut

from ..__about__ import __version__
from .._request._options import EKSOptions
from ._errors import SilentError, UnreachedError, read_warnings, to_error, warn
from ._kubeconfig import ACCOUNT, in_cluster, read_kubeconfig, set_proxy

# Room for a page of pods, each of which may be as large as a Job (about 1 MB).
_ANSWER_BYTES = 256 * 1024 * 1024
_REFUSAL_BYTES = 1024 * 1024
# A whole answer may take this many times the pause that is allowed between two of its pieces.
_PAUSES = 10


class _Limit(threading.local):
    """The deadline for the calls of one thread."""

    deadline: float | None = None
    clock: Callable[[], float] = staticmethod(time.monotonic)

    least: float = 1.0
    endless: bool = False

    def left(self) -> float:
        """Return the seconds until the deadline, never less than ``least``."""
        return math.inf if self.deadline is None else max(self.least, self.deadline - self.clock())


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the cluster.

    Attributes:
        what: What it does, in words, such as ``"read Job default/run-1"``.
        method: GET, POST, PATCH (which merges) or DELETE.
        path: The path of the object or list.
        query: Parameters of the call.
        body: JSON to send.
    """

    what: str
    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: object = None


class Client:
    """A client of the Kubernetes API.

    Never reads or writes the client library's global configuration. Thread-safe.

    Args:
        options: ``context``, ``kubeconfig``, ``batch_api``, ``core_api`` and ``request_timeout``.
    """

    def __init__(self, options: EKSOptions) -> None:
        path = options.kubeconfig
        self._context = options.context
        self._kubeconfig = None if path is None else os.fspath(path)
        self._given = options.batch_api, options.core_api
        self._timeout = options.request_timeout or 0.001
        self._lock = threading.Lock()
        self._made: Any = None
        self._expires = math.inf
        self._refused = False
        self._inside = False
        self._limit = _Limit()

    @property
    def server(self) -> str:
        """Return the API server's address, without user and password, since handles carry it.

        Raises:
            AuthError: There is no configuration.
        """
        parts = urlsplit(str(self._api_client().configuration.host))
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")

    def call(self, request: Request, warned: list[str] | None = None) -> Any:
        """Send a request and return the JSON of the answer.

        Args:
            request: The request.
            warned: The cluster's warnings are appended to it.

        Raises:
            BackendError: The call failed.
        """
        what = request.what
        with self.open(request) as answer, _faults(what):
            text = read_bounded(answer, _ANSWER_BYTES, "the answer")
        if warned is not None:
            warned += read_warnings(answer.headers)
        try:
            return json.loads(text or "null")
        except (ValueError, RecursionError) as error:
            shown = redact_and_cut(text[:_REFUSAL_BYTES].decode(errors="replace"), 200)
            raise UnavailableError(
                f"cannot {what}: the answer is not JSON ({error}): {shown}"
            ) from error

    def open(self, request: Request, *, endless: bool = False) -> Any:
        """Send a request and return the answer, whose body has not been read.

        With ``endless``, the body of the answer may take any time, but its headers may not.
        """
        self._limit.endless = endless
        try:
            used = self._api_client()
            try:
                answer = self._send(used, request)
            except AuthError:
                if self._given[0] is not None:
                    raise
                answer = self._send(self._api_client(refused=used), request)
        except AuthError as error:
            if error.retryable and not self._refused:
                self._refused = True
                warn(str(error))
            raise
        finally:
            self._limit.endless = False
        self._refused = False
        return answer

    def pause(self) -> float:
        """Return how many seconds may pass before an answer, and between two pieces of it."""
        return min(self._timeout, self._limit.left())

    def time_up(self) -> float:
        """Return the ``time.monotonic`` deadline of an answer or of all pages of a list."""
        return time.monotonic() + min(_PAUSES * self._timeout, self._limit.left())

    @contextlib.contextmanager
    def until(
        self, deadline: float, clock: Callable[[], float], least: float = 1.0
    ) -> Iterator[None]:
        """Set a deadline for all answers in this thread.

        Every call still has at least ``least`` seconds, so that one look is possible.
        """
        limit = self._limit
        before = limit.deadline, limit.clock, limit.least
        limit.deadline, limit.clock, limit.least = deadline, clock, least
        try:
            yield
        finally:
            limit.deadline, limit.clock, limit.least = before

    def close(self) -> None:
        """Close idle connections; the next call opens new ones."""
        with self._lock:
            made, self._made = self._made, None
        _close(made)

    def _send(self, api_client: Any, request: Request) -> Any:
        from urllib3 import Timeout

        core = self._given[1]
        if core is not None and request.path.startswith("/api/"):
            api_client = core.api_client
        configuration = api_client.configuration
        what, query = request.what, urlencode(request.query)
        kind = "merge-patch+json" if request.method == "PATCH" else "json"
        headers = {"Accept": "application/json, */*", "Content-Type": f"application/{kind}"}
        headers |= api_client.default_headers
        for setting in configuration.auth_settings().values():
            headers[setting["key"]] = setting["value"] or ""
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise InvalidRequestError(
                f"cannot {what}: a header has a value that cannot be sent, such as a token with a "
                "line end in it"
            )
        seconds = self.pause()
        with _faults(what):
            answer = api_client.rest_client.pool_manager.request(
                request.method,
                f"{configuration.host}{request.path}" + (f"?{query}" if query else ""),
                headers=headers,
                body=None if request.body is None else json.dumps(request.body),
                timeout=Timeout(connect=seconds, read=seconds),
                retries=False,  # the client would sleep without our control
                redirect=False,
                preload_content=False,
                decode_content=False,  # unpacked, an answer may have any size
            )
            if 200 <= answer.status < 300:
                return answer
            with contextlib.closing(answer):
                text = answer.read(_REFUSAL_BYTES)
        raise to_error(what, answer.status, text, answer.headers)

    def _api_client(self, refused: Any = None) -> Any:
        """Return the ApiClient to use.

        It is made at the first use, and anew if its credentials have expired or were refused,
        unless another thread has just done so.

        Raises:
            AuthError: There is no configuration, or it cannot be used.
            MissingDependencyError: The package kubernetes is not installed.
        """
        if self._given[0] is not None:
            return self._given[0].api_client
        with self._lock:
            known = self._made
            if known is None or known is refused or time.time() >= self._expires:
                try:
                    self._made, self._expires = self._make()
                except AuthError as error:
                    # A credential file may be in the middle of being replaced, or a plugin may be
                    # unable to renew a token just now; both may succeed a little later.
                    error.retryable = known is not None
                    raise
                _close(known)
            return self._made

    def _make(self) -> tuple[Any, float]:
        """Return an ApiClient, and until when its credentials can be used."""
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise MissingDependencyError(
                f"EKSExecutor needs the package kubernetes: pip install 'kubernetes>=31' ({error})"
            ) from error
        configuration, expires = client.Configuration(), math.inf
        # A token that vanishes must not lead to another cluster.
        self._inside = self._inside or in_cluster(self._kubeconfig, self._context)
        try:
            if self._inside:
                config.load_incluster_config(client_configuration=configuration)
                set_proxy(configuration, None)
            else:
                expires = read_kubeconfig(self._kubeconfig, self._context).load(configuration)
            configuration.refresh_api_key_hook = None  # credentials are renewed here
            # As for kubectl, a line end behind a token is not part of it.
            configuration.api_key = {
                name: secret.rstrip() for name, secret in configuration.api_key.items()
            }
            api_client = client.ApiClient(configuration=configuration)
        except BackendError:
            raise
        # Anything may be wrong with a file; the client's words may quote it
        except Exception as error:  # noqa: BLE001
            where = self._kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            raise AuthError(
                f"no cluster can be reached as {ACCOUNT if self._inside else where} says: "
                f"{type(error).__name__}: {redact_and_cut(str(error), 200)}"
            ) from None
        connections = api_client.rest_client.pool_manager
        connections.pool_classes_by_scheme = {
            scheme: in_time(pool, self.time_up, lambda: self._limit.endless)
            for scheme, pool in connections.pool_classes_by_scheme.items()
        }
        api_client.user_agent = f"diloco-eks/{__version__}"
        return api_client, expires


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    """Translate the errors of a connection."""
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, ReadTimeoutError, SSLError

    try:
        yield
    except (ConnectTimeoutError, SSLError) as error:
        # A certificate that is not trusted now will not be trusted a little later.
        trusted = "CERTIFICATE_VERIFY" not in str(error)
        raise UnreachedError(
            f"cannot {what}: {type(error).__name__}: {error}", retryable=None if trusted else False
        ) from error
    except (HTTPError, OSError) as error:
        kind = SilentError if isinstance(error, ReadTimeoutError) else UnavailableError
        raise kind(f"cannot {what}: {type(error).__name__}: {error}") from error


def _close(api_client: Any) -> None:
    if api_client is not None:
        with contextlib.suppress(Exception):
            api_client.rest_client.pool_manager.clear()
            api_client.close()


def pieces(what: str, response: Any, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield the body of an answer as it comes, and close it, even if it is not read to its end.

    Args:
        what: What was tried, in words.
        response: The answer.
        size: The largest size of a piece, in bytes.

    Raises:
        UnavailableError: The connection broke, or was silent for too long, or the time is up.
    """
    try:
        with _faults(what):
            if hasattr(response, "read1"):
                yield from iter(partial(response.read1, size), b"")
            else:
                # Older clients (urllib3 before 2.2) have no other way to return what has arrived;
                # the size of a chunk is not bounded there.
                yield from response.stream(size)
    finally:
        response.close()
        response.release_conn()
