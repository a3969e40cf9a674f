"""Requests to S3 through obstore, which is faster than s3fs and needs no botocore."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from diloco_protocol import MissingDependencyError

from ..._errors import ConfigurationError, StoreUnavailableError
from ..._redact import redact_uri
from .._guard import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    check_endpoint,
    without_secrets,
    without_secrets_in,
)
from .._transfer import PART_BYTES
from ._blocks import HEAD_BYTES, new_buffer
from ._driver import TooLargeError, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore.store import BackoffConfig, ClientConfig, RetryConfig

    from .._api import Buffer

_CONNECT = timedelta(seconds=CONNECT_SECONDS)
_ANSWER = timedelta(seconds=ANSWER_SECONDS)
# Enough for a part of 8 MiB at 70 kB/s, and for the largest shards at 1 MB/s.
_TRANSFER = timedelta(seconds=120)
# obstore assembles larger parts in memory that each of our threads then keeps: 2.7 MiB each with parts of 1 MiB, 1.1 MiB with
# parts of this size.
_PART_OF_RANGE = 2**17

# The process that used obstore first, in which its threads run.
_process: int | None = None

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class ObstoreDriver:
    """A prefix of an S3 bucket; see :class:`._driver.Driver`. Thread-safe.

    Credentials, region and endpoint come from obstore's own chain: ``AWS_*`` variables, web identity, container and
    instance roles. If the variables hold no key and boto3 is installed, they come from boto3's chain, which also knows
    profiles. Source: https://developmentseed.org/obstore/latest/api/store/aws/.

    An object that is created exclusively is sent in one request, whatever its size, since obstore has no conditional multipart
    upload. All of its blocks are in memory at once, and S3 accepts up to 5 GiB. obstore sends blocks without copying them.
    """

    name = "obstore"
    near = False
    exclusive = True
    deletes_many = True
    copies = 0

    def __init__(self, uri: str) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError as error:
            raise MissingDependencyError(
                f"{redact_uri(uri)!r} needs obstore: pip install 'diloco-core[obstore]'"
            ) from error
        bucket, _, prefix = uri.partition("://")[2].partition("/")
        if not bucket:
            raise ConfigurationError(
                f"{redact_uri(uri)!r} names no bucket: write s3://bucket/folder"
            )
        check_endpoint("s3", empty=False)
        _check_process(uri)
        self._obstore = obstore
        self._errors = exceptions

        credentials = _boto3_chain()

        def connect(limits: ClientConfig, retries: RetryConfig | None = None) -> S3Store:
            try:
                return S3Store(
                    bucket,
                    prefix=prefix.strip("/") or None,
                    # Every payload has checksums of ours; hashing it once more for the signature costs as much as sending
                    # it.
                    unsigned_payload=True,
                    client_options={
                        "connect_timeout": _CONNECT,
                        "allow_http": _plain_http(),
                        **limits,
                    },
                    retry_config=retries or {"max_retries": 0},
                    credential_provider=credentials,
                )
            except (exceptions.BaseError, ValueError) as error:
                raise StoreUnavailableError(
                    f"{redact_uri(uri)} cannot be opened: {without_secrets(str(error), uri)}",
                    lasting=True,
                ) from without_secrets_in(error, uri)

        # Single requests are repeated by RemoteStore, not by obstore.
        self._little = connect({"timeout": _ANSWER})
        self._down = connect({"timeout": _TRANSFER, "read_timeout": _ANSWER})
        self._up = connect({"timeout": _TRANSFER})
        # The parts of an upload can only be sent again by obstore, and its patience cannot be changed later. It starts anew
        # after each part that has succeeded, so the number of retries is hardly limited.
        backoff: BackoffConfig = {
            "init_backoff": timedelta(seconds=0.2),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        }
        self._uploads = {
            seconds: connect(
                {"timeout": _TRANSFER},
                {
                    "max_retries": 10_000,
                    "retry_timeout": timedelta(seconds=seconds),
                    "backoff": backoff,
                },
            )
            for seconds in (60, 300, 1800, 7200)
        }

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object."""
        store = self._little if len(data) <= HEAD_BYTES else self._up
        self._obstore.put(
            store, key, data, mode="create" if exclusive else "overwrite", use_multipart=False
        )

    def upload(
        self,
        key: str,
        blocks: Iterator[Buffer],
        *,
        exclusive: bool,
        attempt: Callable[..., None],
        patience: float,
        at_once: int,
    ) -> None:
        """Write a large object in parts; if ``exclusive``, in one request."""
        if exclusive:
            all_blocks = list(blocks)
            attempt(
                lambda: self._obstore.put(
                    self._up, key, iter(all_blocks), mode="create", use_multipart=False
                )
            )
        else:
            long_enough = [seconds for seconds in self._uploads if seconds >= patience]
            store = self._uploads[min(long_enough, default=max(self._uploads))]
            self._obstore.put(store, key, blocks, chunk_size=PART_BYTES, max_concurrency=at_once)

    def get(self, key: str, largest: int) -> Buffer:
        """Read a whole object; its size is known before its bytes are read."""
        answer = self._obstore.get(self._little, key)
        if answer.meta["size"] > largest:
            raise TooLargeError(answer.meta["size"])
        return memoryview(answer.bytes())

    def head(self, key: str) -> tuple[int, Buffer]:
        """Size and first bytes of an object, with one request."""
        try:
            answer = self._obstore.get(self._little, key, options={"range": (0, HEAD_BYTES)})
        except self._errors.GenericError as error:
            if _status(error) != 416:
                raise
            # The object is empty, so that there is no first byte to ask for.
            return self._obstore.head(self._little, key)["size"], b""
        return answer.meta["size"], memoryview(answer.bytes())

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""
        # In small parts, into a buffer of ours: obstore would collect a whole range in memory that grows by doubling, and
        # would keep the freed memory for later.
        buffer, filled = new_buffer(stop - start), 0
        for part in self._obstore.get(self._down, key, options={"range": (start, stop)}).stream(
            _PART_OF_RANGE
        ):
            data = memoryview(part)
            if filled + len(data) > stop - start:
                break  # the server has sent too much: the result is then too short, and is refused
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        return buffer[:filled]

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        sizes = {
            item["path"]: item["size"]
            for batch in self._obstore.list(self._little, prefix)
            for item in batch
        }
        # obstore leaves out the "/" at the end of a placeholder's name. Placeholders are empty, and few other objects are, so
        # only empty ones are checked.
        return {key: size for key, size in sizes.items() if size or self._is_there(key)}

    def _is_there(self, key: str) -> bool:
        try:
            self._obstore.head(self._little, key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, a thousand with one request."""
        self._obstore.delete(self._little, keys)

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """What an error means."""
        message = str(error).partition("\n\nDebug source")[0]
        status, codes = _status(error), _CODE.findall(message)
        if codes:
            message = f"{message.partition('<?xml')[0].partition('<Error>')[0].strip()} {codes[0]}"
        if "/latest/" in message:
            message += " (obstore asks there for the machine's credentials, since the environment holds none)"
        if "NoSuchBucket" in codes:
            return Verdict.NO_BUCKET, message
        if isinstance(error, FileNotFoundError):
            return Verdict.MISSING, message
        if isinstance(error, self._errors.AlreadyExistsError):
            # obstore also raises this at a conflict of two writers, after which S3 asks for another try.
            return (Verdict.TRANSIENT if status == 409 else Verdict.EXISTS), message
        if isinstance(
            error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)
        ):
            return Verdict.FORBIDDEN, message
        if isinstance(error, self._errors.InvalidPathError):
            return (
                Verdict.PERMANENT,
                f"{message}. Remove that object, which does not belong to the run, or use fsspec+s3://",
            )
        if not isinstance(error, self._errors.GenericError):
            return Verdict.PERMANENT, message
        if status in {401, 403} or "Credential" in message:
            return Verdict.FORBIDDEN, message
        if status is not None and 400 <= status < 500 and status not in {408, 409, 425, 429}:
            return Verdict.PERMANENT, message
        return Verdict.TRANSIENT, message

    def close(self) -> None:
        """Nothing to do: idle connections close by themselves."""


def _check_process(uri: str) -> None:
    """Refuse a process that was forked from one in which obstore is in use: requests would hang for ever in both."""
    global _process  # noqa: PLW0603 - obstore also has only one runtime per process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StoreUnavailableError(
            f"{redact_uri(uri)} cannot be opened: obstore was used in process {_process} before this one ({os.getpid()}) was "
            "forked from it, and obstore does not work after a fork. Connect only after forking, start processes by spawn "
            "(multiprocessing.set_start_method('spawn')), or use fsspec+s3://.",
            lasting=True,
        )


def _status(error: Exception) -> int | None:
    status = _STATUS.search(str(error))
    return int(status[1]) if status else None


def _plain_http() -> bool:
    """Whether the environment names an endpoint without TLS, so that plain HTTP is intended."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def _boto3_chain() -> Any:
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except (ImportError, ValueError):
        # boto3 is not installed, or finds no credentials: obstore's own chain may find some.
        return None
