"""Requests through fsspec: S3, GCS, Azure, memory and whatever else has a driver."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from diloco_protocol import MissingDependencyError

from ..._errors import ConfigurationError, StoreUnavailableError
from ..._redact import redact_uri
from .._api import Buffer
from .._guard import ANSWER_SECONDS, CONNECT_SECONDS, S3, cannot_open, without_secrets_in
from .._transfer import CONNECTIONS, PART_BYTES
from ._credentials import once_at_a_time
from ._driver import Sending, TooLargeError, Verdict, is_known, verdict_of
from ._files import FULL
from ._uploads import MOST_PARTS, UploadBlocks

_GCS, _AZURE = {"gs", "gcs"}, {"az", "abfs", "abfss"}
_PACKAGES = {
    **dict.fromkeys(S3, "diloco-core[s3]"),
    **dict.fromkeys(_GCS, "diloco-core[gcs]"),
    **dict.fromkeys(_AZURE, "diloco-core[azure]"),
}
_FIRST_BYTES = 2**20
# Packages whose pipe_file and put_file send a conditional write for mode="create" (s3fs:
# If-None-Match, also when a multipart upload is completed; gcsfs: ifGenerationMatch=0; adlfs:
# overwrite=False). Other drivers inherit from fsspec's base class, which first looks and then
# writes, or have code of their own that was not examined.
_EXCLUSIVE = {"s3fs", "gcsfs", "adlfs"}
# fsspec's memory file system also first looks and then writes. There is only one per process, so
# one lock is enough.
_memory_lock = threading.Lock()
# The names of errors by which drivers say that there are no credentials. Their classes are not ours
# to import.
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "DefaultCredentialsError",
    "RefreshError",
    "NonRetryableError",  # gcsfs's, for credentials that cannot be renewed
    "ClientAuthenticationError",
    "CredentialUnavailableError",
}
_HOPELESS = {errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR}


class FsspecDriver:
    """A prefix of any store that fsspec has a driver for; see :class:`._driver.Driver`.

    Thread-safe.

    Credentials come from the driver's own chain. Listings are never cached. An object of more than
    5 MiB is first written to a temporary file, from which it can be sent in parts, and sent again;
    so ``$TMPDIR`` needs room for one object. This does not apply to ``memory://``.

    Exclusive writes are a single step with s3fs, gcsfs, adlfs and ``memory://``. With any other
    driver :attr:`exclusive` is False, even if the store behind it supports exclusive writes.
    """

    def __init__(self, uri: str, connections: int = CONNECTIONS) -> None:
        scheme = uri.partition("://")[0]
        self.near = scheme == "memory"
        self.name = f"fsspec's driver for {scheme}://"
        self._where = uri, scheme, connections
        self._open()
        self.exclusive = self.near or type(self._fs).__module__.partition(".")[0] in _EXCLUSIVE
        self.deletes_many = False
        # S3fs holds a part that it has read from the file, and the request that it makes from it
        self.copies = 2
        self._in_parts = scheme in S3
        self._renewing = threading.Lock()

    def _open(self) -> None:
        self._fs, self._root = _filesystem(*self._where)

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object."""
        self._pipe(key, bytes(data), exclusive)

    def upload(self, key: str, blocks: UploadBlocks, sending: Sending) -> None:
        """Write a large object, through a temporary file."""
        attempt, exclusive = sending.attempt, sending.exclusive
        if self.near:
            data = b"".join(blocks)
            attempt(lambda: self._pipe(key, data, exclusive))
            return
        with _spooled(key, blocks) as (file, size):
            options: dict[str, Any] = dict(_mode(exclusive))
            if self._in_parts:  # how s3fs is to cut the upload
                options["chunksize"] = max(PART_BYTES, -(-size // MOST_PARTS))
                options["max_concurrency"] = sending.at_once
            attempt(lambda: self._fs.put_file(file, self._path(key), **options))

    def get(self, key: str, largest: int) -> Buffer:
        """Read a whole object: first its beginning, then the rest if that is not too large.

        The beginning is usually all of it.
        """
        path = self._path(key)
        try:
            first = self._fs.cat_file(path, start=0, end=_FIRST_BYTES)
        except Exception as error:
            if _answer(error)[0] != 416:
                raise
            first = b""  # an empty object has no first byte
        size = len(first) if len(first) < _FIRST_BYTES else int(self._info(path)["size"])
        if size > largest:
            raise TooLargeError(size)
        if size > len(first):
            return memoryview(first + self._fs.cat_file(path, start=len(first), end=size))
        return memoryview(first)

    def head(self, key: str) -> tuple[int, Buffer]:
        """Size of an object."""
        return int(self._info(self._path(key))["size"]), b""

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""
        return memoryview(self._fs.cat_file(self._path(key), start=start, end=stop))

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        self._fs.invalidate_cache()
        files = self._fs.find(self._path(prefix.rstrip("/")), detail=True)
        start = len(self._root) + 1
        # Some drivers leave out the "/" at the end of a placeholder's name. Placeholders are empty,
        # and few other objects are, so only empty ones are checked.
        return {
            path[start:]: int(info["size"])
            for path, info in files.items()
            if info.get("type") == "file" and (info["size"] or self.near or self._is_file(path))
        }

    def _is_file(self, path: str) -> bool:
        try:
            return bool(self._info(path).get("type") == "file")
        except FileNotFoundError:
            return False

    def _info(self, path: str) -> Any:
        """Return what is known of an object.

        If that is refused without a reason, one is asked for: HEAD has no room for it.
        """
        try:
            return self._fs.info(path)
        except Exception as error:
            status, code, _ = _answer(error)
            if not self._in_parts or is_known(code) or status not in {400, 403}:
                raise
            self._fs.cat_file(path, start=0, end=1)
            raise TimeoutError(f"{error}, although the object can be read") from error

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, one by one."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """Return what an error means, and its text.

        Drivers raise OSErrors, their own errors, and OSErrors that are caused by their own errors.
        """
        status, code, sentence = _answer(error)
        text = next(filter(None, (str(error), sentence, *map(str, _causes(error)))), "")
        message = ": ".join(filter(None, (type(error).__name__, text)))
        message += f" ({code})" if code else ""
        if is_known(code):
            return verdict_of(status, code) or Verdict.PERMANENT, message
        if type(error).__name__ in _NO_CREDENTIALS:
            return Verdict.EXPIRED, message
        if isinstance(error, FileExistsError) and status != 409:
            return Verdict.EXISTS, message
        if isinstance(error, FileNotFoundError):
            return Verdict.MISSING, message
        verdict = verdict_of(status, code)
        if verdict is not None:
            return verdict, message
        if isinstance(error, PermissionError):
            return Verdict.FORBIDDEN, message
        if (
            isinstance(error, (TypeError, ValueError, NotImplementedError))
            or getattr(error, "errno", 0) in _HOPELESS
        ):
            return Verdict.PERMANENT, message
        return Verdict.TRANSIENT, message

    def renew(self) -> None:
        """Begin anew with a file system that asks for credentials.

        Each keeps those that it has, whatever the service says.
        """
        once_at_a_time(self._renewing, self._open)

    def _pipe(self, key: str, data: bytes, exclusive: bool) -> None:
        with _memory_lock if self.near else contextlib.nullcontext():
            self._fs.pipe_file(self._path(key), data, **_mode(exclusive))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def _filesystem(uri: str, scheme: str, connections: int) -> tuple[Any, str]:
    try:
        _check_known(uri, scheme)
        # Caches would hide what other replicas write, and a shared instance might have one.
        fs, root = fsspec.core.url_to_fs(
            uri, use_listings_cache=False, skip_instance_cache=True, **_limits(scheme, connections)
        )
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        advice = (
            f"pip install '{package}'"
            if package
            else known_implementations.get(scheme, {}).get("err", str(error))
        )
        raise MissingDependencyError(
            f"{redact_uri(uri)!r} needs the fsspec driver for {scheme}://, which is not installed: "
            f"{advice}"
        ) from without_secrets_in(error, uri)
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001 - every driver has its own errors
        failed = error
    else:
        _prepare(fs, scheme)
        return fs, str(root).rstrip("/")
    raise cannot_open(uri, failed) from without_secrets_in(failed, uri)


def _prepare(fs: Any, scheme: str) -> None:
    """Stop a driver from retrying by itself, since only RemoteStore knows how long to retry.

    The names of the drivers' attributes may change: where one is missing, the driver is left as it
    is.

    s3fs makes its client now, as the other drivers have done already. That takes seconds, which
    would otherwise be a part of the first request, and of the time in which that is retried. If it
    fails, the first request meets the same error, and reports it.
    """
    with contextlib.suppress(Exception):
        if scheme in S3:
            fs.retries = 1
            fs.connect()
        elif scheme in _GCS:
            fs._request = functools.partial(type(fs)._request.__wrapped__, fs)  # noqa: SLF001
        elif scheme in _AZURE:
            fs.service_client._config.retry_policy.total_retries = 0  # noqa: SLF001


def _check_known(uri: str, scheme: str) -> None:
    if "::" in scheme:
        return  # a chain, such as simplecache::memory
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise ConfigurationError(
            f"{redact_uri(uri)!r} has the unknown scheme {scheme!r}. Use the path of a folder, "
            "file://, memory://, s3://, gs:// or az://. Other schemes that fsspec knows are "
            "possible too; fsspec.available_protocols() lists them."
        ) from None


def _limits(scheme: str, connections: int) -> dict[str, Any]:
    """Settings that make a driver give up in time and leave retries to us.

    Settings of the user take precedence.
    """
    settings = fsspec.config.conf.get(scheme, {})
    if scheme in S3:
        limits = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": ANSWER_SECONDS,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": connections,  # further requests wait inside the driver
        }
        return {"config_kwargs": {**limits, **(settings.get("config_kwargs") or {})}}
    if scheme in _GCS:
        import aiohttp

        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS
        )
        return {"session_kwargs": {"timeout": timeout, **(settings.get("session_kwargs") or {})}}
    if scheme in _AZURE:
        limits = {"connection_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS}
        return {name: value for name, value in limits.items() if name not in settings}
    return {}


@contextlib.contextmanager
def _spooled(key: str, blocks: Iterator[Buffer]) -> Iterator[tuple[str, int]]:
    """Write the blocks to a temporary file. The context is its path and its size in bytes.

    The file is removed at the end.

    Raises:
        StoreUnavailableError: The folder for temporary files cannot hold it. If that is full, there
            may be room later.
    """
    with contextlib.ExitStack() as stack:
        size = 0
        try:
            file = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix="diloco-upload-", buffering=0)
            )
            for block in blocks:
                unwritten = memoryview(block)
                size += len(unwritten)
                while unwritten:
                    unwritten = unwritten[os.write(file.fileno(), unwritten) :]
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot write object {key!r}: it is first written to the folder for temporary "
                f"files, which cannot hold it ({error.strerror or error}). Nothing was sent. Make "
                "room there, or set TMPDIR to another folder.",
                anew=error.errno in FULL,
            ) from error
        yield file.name, size


def _mode(exclusive: bool) -> dict[str, str]:
    # Some drivers do not accept mode, and always write over what is there.
    return {"mode": "create"} if exclusive else {}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error that caused this one, and so on.

    fsspec raises a timeout without a text over that of s3fs over botocore's.
    """
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _answer(error: BaseException) -> tuple[int | None, str | None, str | None]:
    """Return the HTTP status, the service's own code, and its sentence.

    They come from an error or its causes (botocore, google, azure, aiohttp).
    """
    for link in (error, *_causes(error)):
        if type(link).__module__ == "aiohttp.http_exceptions":
            continue  # the answer was cut off, and this "code" was not sent by a server
        if isinstance(link, OSError) and str(link).startswith("Forbidden: "):
            # gcsfs makes this of every answer with status 403: the URL, and in the next line what
            # the service says.
            limited = "rate limit" in str(link).partition("\n")[2].lower()
            return 403, "rateLimitExceeded" if limited else "forbidden", None
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            answer = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, answer.get("Code"), answer.get("Message")
        code = getattr(link, "error_code", None)
        for name in ("status", "status_code", "code"):
            value = getattr(link, name, None)
            if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
                return int(value), None if code is None else str(getattr(code, "value", code)), None
    return None, None, None
