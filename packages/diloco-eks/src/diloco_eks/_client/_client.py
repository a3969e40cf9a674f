"""Calls to the cluster, with its own ApiClient, the protocol's errors, and renewed credentials."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

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
from ._errors import SilentError, UnreachedError, read_answer, read_warnings, to_error, warn
from ._kubeconfig import (
    ACCOUNT,
    in_cluster,
    obey,
    read_kubeconfig,
    unquoted,
    words_of_plugins_cut,
)

# Room for a page of pods, each of which may be as large as a Job (about 1 MB).
_ANSWER_BYTES = 256 * 1024 * 1024
_REFUSAL_BYTES = 1024 * 1024
# A whole answer may take this many times the pause that is allowed between two of its pieces.
_PAUSES = 10
_PACKED = "the answer is compressed, although the request did not ask for that: it is not read"


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
class Apis:
    """The classes of the client library that we call, all on one ApiClient."""

    batch: Any
    core: Any
    custom: Any
    authorization: Any
    groups: Any


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
        self._apis: Apis | None = None
        self._refused = False
        self._inside = False
        self._limit = _Limit()

    @property
    def server(self) -> str:
        """Return the API server's address, without user and password, since handles carry it.

        Raises:
            AuthError: There is no configuration.
        """
        parts = urlsplit(str(self.apis().batch.api_client.configuration.host))
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")

    def unheeded(self) -> list[str]:
        """Return which settings of the kubeconfig kubectl would obey and we cannot, in words."""
        if self._given[0] is not None or in_cluster(self._kubeconfig, self._context):
            return []
        return read_kubeconfig(self._kubeconfig, self._context).unheeded()

    def apis(self) -> Apis:
        """Return the client's classes, which are made at the first use.

        Raises:
            AuthError: There is no configuration, or it cannot be used.
            MissingDependencyError: The package kubernetes is not installed.
        """
        with self._lock:
            if self._apis is None:
                self._apis = self._make()
            return self._apis

    def call(self, what: str, make: Callable[[Apis], Any], warned: list[str] | None = None) -> Any:
        """Make one call and return its JSON.

        Args:
            what: What the call does, in words, such as ``"read Job default/run-1"``.
            make: Makes the call with ``_preload_content=False`` and ``_request_timeout`` (see
                :meth:`options`).
            warned: The cluster's warnings are appended to it.

        Raises:
            BackendError: The call failed.
        """
        body, headers = self.raw(what, lambda apis: _read(make(apis)))
        if warned is not None:
            warned += read_warnings(headers)
        try:
            return json.loads(body or "null")
        except (ValueError, RecursionError) as error:
            shown = redact_and_cut(body[:_REFUSAL_BYTES].decode(errors="replace"), 200)
            raise UnavailableError(
                f"cannot {what}: the answer is not JSON ({error}): {shown}"
            ) from error

    def raw(self, what: str, make: Callable[[Apis], Any], *, endless: bool = False) -> Any:
        """Make one call and return the result of ``make``.

        With ``endless``, the body of the answer may take any time, but its headers may not.
        """
        apis = self.apis()
        self._limit.endless = endless
        try:
            answer = _translated(what, make, apis)
        except AuthError:
            if self._given[0] is not None:
                raise
            answer = self._with_new_credentials(what, make, apis)
        finally:
            self._limit.endless = False
        self._refused = False
        return answer

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for every call."""
        seconds = min(self._timeout, self._limit.left())
        return {"_preload_content": False, "_request_timeout": (seconds, seconds)}

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
            apis, self._apis = self._apis, None
        if apis is not None and self._given[0] is None:
            _close(apis)

    def _with_new_credentials(self, what: str, make: Callable[[Apis], Any], used: Apis) -> Any:
        try:
            self._renew(used)
            return _translated(what, make, self.apis())
        except AuthError as error:
            if not self._refused:
                self._refused = True
                warn(str(error))
            # A credential file may be in the middle of being replaced, or a plugin may be unable to
            # renew a token just now; both may succeed a little later.
            error.retryable = True
            raise

    def _renew(self, used: Apis) -> None:
        """Load the credentials anew, unless another thread has just done so."""
        with self._lock:
            if self._apis is used:
                self._apis = self._make()
                _close(used)

    def _make(self) -> Apis:
        try:
            from kubernetes import client
        except ImportError as error:
            raise MissingDependencyError(
                f"EKSExecutor needs the package kubernetes: pip install 'kubernetes>=31' ({error})"
            ) from error
        batch, core = self._given
        if batch is None and core is None:
            api_client, headers = self._own(client)
            connections = api_client.rest_client.pool_manager
            connections.pool_classes_by_scheme = {
                scheme: in_time(pool, self.time_up, lambda: self._limit.endless)
                for scheme, pool in connections.pool_classes_by_scheme.items()
            }
            _bound_refusals(connections)
            api_client.user_agent = f"diloco-eks/{__version__}"
            for name, value in headers.items():
                api_client.set_default_header(name, value)
        else:
            api_client = (batch or core).api_client
        return Apis(
            batch or client.BatchV1Api(api_client),
            core or client.CoreV1Api(api_client),
            client.CustomObjectsApi(api_client),
            client.AuthorizationV1Api(api_client),
            client.ApisApi(api_client),
        )

    def _own(self, client: Any) -> tuple[Any, dict[str, str]]:
        """Return an ApiClient, and the headers that all requests need."""
        from kubernetes import config

        configuration = client.Configuration()
        kubeconfig = None
        # A token that vanishes must not lead to another cluster.
        self._inside = self._inside or in_cluster(self._kubeconfig, self._context)
        try:
            if self._inside:
                config.load_incluster_config(client_configuration=configuration)
            else:
                kubeconfig = read_kubeconfig(self._kubeconfig, self._context)
                with words_of_plugins_cut():
                    config.load_kube_config(
                        config_file=kubeconfig.files,
                        context=kubeconfig.context,
                        client_configuration=configuration,
                        persist_config=False,
                    )
            # We retry ourselves: the client would sleep without our control.
            configuration.retries = False
            headers = obey(configuration, kubeconfig)
            return client.ApiClient(configuration=configuration), headers
        except BackendError:
            raise
        # Anything may be wrong with a file or its credential plugin
        except Exception as error:  # noqa: BLE001
            where = self._kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            where = str(ACCOUNT) if self._inside else where
            named = "" if self._context is None else f", context {self._context!r}"
            raise AuthError(
                f"no cluster can be read from {where}{named}: {unquoted(error)}. On EKS: aws eks "
                "update-kubeconfig --name CLUSTER; or give kubeconfig=, context=, or run inside a "
                "pod"
            ) from None


def _read(response: Any) -> tuple[bytes, Any]:
    """Return the body and the headers of an answer; reading may fail as the call may."""
    with contextlib.closing(response):
        if _is_packed(response):
            raise UnavailableError(_PACKED)
        return read_bounded(response, _ANSWER_BYTES, "the answer"), response.headers


def _is_packed(response: Any) -> bool:
    """Return whether reading an answer would unpack it.

    We never ask for packed answers, and older clients unpack them without a size limit.
    """
    return (response.headers.get("Content-Encoding") or "identity").lower() != "identity"


def _bound_refusals(connections: Any) -> None:
    """Limit how much the client reads of an answer that reports a failure.

    The client itself would read all of it.
    """
    from urllib3 import HTTPResponse

    request = connections.request

    def bounded(*args: Any, **options: Any) -> Any:
        answer = request(*args, **options)
        if 200 <= answer.status < 300:
            return answer
        body = bytearray()
        with contextlib.closing(answer):
            while not _is_packed(answer) and (piece := answer.read(_REFUSAL_BYTES - len(body))):
                body += piece
        # Some clients fail on an empty body.
        return HTTPResponse(
            bytes(body) or b" ", answer.headers, answer.status, reason=answer.reason
        )

    connections.request = bounded


def _translated(what: str, make: Callable[[Apis], Any], apis: Apis) -> Any:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, ReadTimeoutError, SSLError

    try:
        return make(apis)
    except BackendError:
        raise
    except ApiException as error:
        raise _answered(what, error) from error
    except (ConnectTimeoutError, SSLError) as error:
        raise _unreached(f"cannot {what}: {type(error).__name__}: {error}") from error
    except (HTTPError, OSError) as error:
        kind = SilentError if isinstance(error, ReadTimeoutError) else UnavailableError
        raise kind(f"cannot {what}: {type(error).__name__}: {error}") from error
    except (AttributeError, ValueError, TypeError) as error:
        # Some clients (36) fail on a body that is empty or not UTF-8 before they raise their own
        # error.
        if isinstance(error.__context__, ApiException):
            raise _answered(what, error.__context__) from error
        if isinstance(error, AttributeError):
            raise
        # Newer clients check their arguments before they send them.
        if "header value" in str(error):  # the error quotes the value, which may be a token
            raise InvalidRequestError(
                f"cannot {what}: a header has a value that cannot be sent, such as a token with a "
                "line end in it"
            ) from None
        raise InvalidRequestError(
            f"cannot {what}: the kubernetes client refuses it: {error}"
        ) from error


def _answered(what: str, error: Any) -> BackendError:
    """Return the error for an ApiException."""
    if not error.status:  # the client wraps an SSLError in this way
        return _unreached(f"cannot {what}: {error.reason}")
    return to_error(read_answer(int(error.status), error.body, error.headers), what)


def _unreached(text: str) -> UnreachedError:
    # A certificate that is not trusted now will not be trusted a little later.
    return UnreachedError(text, retryable=False if "CERTIFICATE_VERIFY" in text else None)


def _close(apis: Apis) -> None:
    with contextlib.suppress(Exception):
        apis.batch.api_client.rest_client.pool_manager.clear()
        apis.batch.api_client.close()


def pieces(what: str, response: Any, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield the body of an answer as it comes, and close it, even if it is not read to its end.

    Args:
        what: What was tried, in words.
        response: The answer.
        size: The largest size of a piece, in bytes.

    Raises:
        UnavailableError: The connection broke, or was silent for too long, or the time is up.
    """
    from urllib3.exceptions import HTTPError, ReadTimeoutError

    if _is_packed(response):
        response.close()
        raise UnavailableError(f"cannot {what}: {_PACKED}")
    try:
        if hasattr(response, "read1"):
            yield from iter(partial(response.read1, size), b"")
        else:
            # Older clients (urllib3 before 2.2) have no other way to return what has arrived; the
            # size of a chunk is not bounded there.
            yield from response.stream(size)
    except (HTTPError, OSError) as error:
        kind = SilentError if isinstance(error, ReadTimeoutError) else UnavailableError
        raise kind(f"cannot {what}: {type(error).__name__}: {error}") from error
    finally:
        response.close()
        response.release_conn()
