"""Requests to S3 through obstore, which is faster than s3fs and needs no botocore."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from html import unescape
from typing import TYPE_CHECKING

from diloco_protocol import MissingDependencyError

from ..._errors import ConfigurationError, StoreUnavailableError
from ..._redact import redact_uri
from .._api import Buffer
from .._guard import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    S3_ENDPOINTS,
    cannot_open,
    check_endpoint,
    without_secrets_in,
)
from .._transfer import PART_BYTES
from ._blocks import HEAD_BYTES, new_buffer
from ._credentials import credentials_of_botocore, once_at_a_time
from ._driver import Sending, TooLargeError, Verdict, verdict_of
from ._uploads import UploadBlocks

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig

_CONNECT = timedelta(seconds=CONNECT_SECONDS)
_ANSWER = timedelta(seconds=ANSWER_SECONDS)
# Enough for a part of 8 MiB at 70 kB/s, and for the largest shards at 1 MB/s.
_TRANSFER = timedelta(seconds=120)
# obstore assembles larger parts in memory that each of our threads then keeps: 2.7 MiB each with
# parts of 1 MiB, 1.1 MiB with parts of this size.
_PART_OF_RANGE = 2**17

# The process that used obstore first, in which its threads run.
_process: int | None = None

# Only what comes after the URL is looked at: prefixes may have any name.
_ANSWER_OF_SERVER = re.compile(
    r"(?P<before>.* in [^ ]+s\b.* - Server returned (?:non-2xx status code|error response))"
    r"(?:: (?P<status>\d{3}) [^:]*)?: (?P<body>.*)",
    re.DOTALL,
)
_DELETION = re.compile(r"\(code: (\w+)\)$")
_CODE = re.compile(r"<Code>\s*([\w.]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_URL = re.compile(r"Error performing [A-Z]+ (\S+)")
_OF_CREDENTIALS = re.compile(
    r"https?://([^/]+/latest/(api/token$|meta-data/iam/)|169\.254\.170\.\d+|sts\.[a-z0-9.-]*amazonaws\.)"
)
_LONGEST_BODY = 300
# obstore looks for these anywhere in some answers with status 200, and keys are in such answers.
_TAKEN_FOR_ERRORS = ("SlowDown", "InternalError")


class ObstoreDriver:
    """A prefix of an S3 bucket; see :class:`._driver.Driver`. Thread-safe.

    Region and endpoint come from obstore's own chain. So do credentials if ``AWS_*`` variables hold
    them or botocore is not installed (web identity, container and instance roles); otherwise from
    botocore's chain, which also knows profiles, SSO and credential processes. Source:
    https://developmentseed.org/obstore/latest/api/store/aws/.

    An object that is created exclusively is sent in one request, whatever its size, since obstore
    has no conditional multipart upload. All of its blocks are in memory at once, and S3 accepts up
    to 5 GiB. obstore sends blocks without copying them.
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
        except ImportError as error:
            raise MissingDependencyError(
                f"{redact_uri(uri)!r} needs obstore: pip install 'diloco-core[obstore]'"
            ) from error
        bucket, _, prefix = uri.partition("://")[2].partition("/")
        if not bucket:
            raise ConfigurationError(
                f"{redact_uri(uri)!r} names no bucket: write s3://bucket/folder"
            )
        if any(name in prefix for name in _TAKEN_FOR_ERRORS):
            raise ConfigurationError(
                f"{redact_uri(uri)!r} holds {' or '.join(_TAKEN_FOR_ERRORS)}: obstore takes "
                "answers that repeat it for errors. Write fsspec+s3://, or use another prefix."
            )
        check_endpoint("s3", empty=False)
        _check_process(uri)
        self._obstore = obstore
        self._errors = exceptions

        self._uri, self._bucket, self._prefix = uri, bucket, prefix
        self._renewing = threading.Lock()
        self._open()

    def _open(self) -> None:
        from obstore.store import S3Store

        uri, bucket, prefix, exceptions = self._uri, self._bucket, self._prefix, self._errors
        try:
            credentials = credentials_of_botocore()
        except Exception as error:  # noqa: BLE001 - botocore need not be installed
            why = "there are no credentials, "
            raise cannot_open(uri, error, why) from without_secrets_in(error, uri)

        endpoints = [os.environ.get(name, "") for name in S3_ENDPOINTS]

        def connect(limits: ClientConfig, retries: RetryConfig | None = None) -> S3Store:
            try:
                return S3Store(
                    bucket,
                    prefix=prefix.strip("/") or None,
                    # Every payload has checksums of ours; hashing it once more for the signature
                    # costs as much as sending it.
                    unsigned_payload=True,
                    client_options={
                        "connect_timeout": _CONNECT,
                        # An endpoint without TLS is only used where it is named as such.
                        "allow_http": any(url.startswith("http://") for url in endpoints),
                        **limits,
                    },
                    retry_config=retries or {"max_retries": 0},
                    credential_provider=credentials,
                )
            except (exceptions.BaseError, ValueError) as error:
                raise cannot_open(uri, error) from without_secrets_in(error, uri)

        # Single requests are repeated by RemoteStore, not by obstore.
        self._little = connect({"timeout": _ANSWER})
        self._down = connect({"timeout": _TRANSFER, "read_timeout": _ANSWER})
        self._up = connect({"timeout": _TRANSFER})
        # The parts of an upload can only be sent again by obstore. After this time, which begins
        # anew with each part that has succeeded, the whole object is sent again. So the number of
        # retries is hardly limited.
        backoff: BackoffConfig = {
            "init_backoff": timedelta(seconds=0.2),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        }
        retries: RetryConfig = {
            "max_retries": 10_000,
            "retry_timeout": timedelta(seconds=60),
            "backoff": backoff,
        }
        self._in_parts = connect({"timeout": _TRANSFER}, retries)

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object."""
        store = self._little if len(data) <= HEAD_BYTES else self._up
        self._obstore.put(
            store, key, data, mode="create" if exclusive else "overwrite", use_multipart=False
        )

    def upload(self, key: str, blocks: UploadBlocks, sending: Sending) -> None:
        """Write a large object in parts; if ``exclusive``, in one request."""
        if sending.exclusive:
            all_blocks = list(blocks)
            sending.attempt(
                lambda: self._obstore.put(
                    self._up, key, iter(all_blocks), mode="create", use_multipart=False
                )
            )
        else:
            self._obstore.put(
                self._in_parts, key, blocks, chunk_size=PART_BYTES, max_concurrency=sending.at_once
            )

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
            refusal = _answer(error)
            if refusal is None or refusal["status"] != "416":
                raise
            # The object is empty, so that there is no first byte to ask for.
            return self._obstore.head(self._little, key)["size"], b""
        return answer.meta["size"], memoryview(answer.bytes())

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""
        # In small parts, into a buffer of ours: obstore would collect a whole range in memory that
        # grows by doubling, and would keep the freed memory for later.
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
        # obstore leaves out the "/" at the end of a placeholder's name. Placeholders are empty, and
        # few other objects are, so only empty ones are checked.
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
        """Return what an error means."""
        message, answer = _message(error), _answer(error)
        status, code = None, None
        if answer is not None:
            status = int(answer["status"] or 200)
            code, shown = _sentence(answer["body"])
            message = f"{answer['before']}{f' {status}' if answer['status'] else ''}: {shown}"
        elif deletion := _DELETION.search(message):
            code = deletion[1]
        url = _URL.search(message)
        if isinstance(error, self._errors.UnauthenticatedError) and status is None:
            return Verdict.EXPIRED, message  # raised by the provider of the credentials
        if url is not None and _OF_CREDENTIALS.match(url[1]):
            advice = (
                "obstore asks there for credentials, since the environment holds none; for a "
                "profile, SSO or a credential process, install botocore, or use fsspec+s3://"
            )
            return Verdict.EXPIRED, f"{message} ({advice})"
        if "Received redirect without LOCATION" in message:
            return Verdict.WRONG_PLACE, message
        if isinstance(error, self._errors.InvalidPathError):
            advice = "Remove that object, which does not belong to the run, or use fsspec+s3://"
            return Verdict.PERMANENT, f"{message}. {advice}"
        verdict = verdict_of(status, code)
        if verdict is not None:
            return verdict, message
        if isinstance(error, FileNotFoundError):
            return Verdict.MISSING, message
        passes = isinstance(error, self._errors.GenericError)
        return (Verdict.TRANSIENT if passes else Verdict.PERMANENT), message

    def renew(self) -> None:
        """Make new connections, which ask for credentials anew."""
        once_at_a_time(self._renewing, self._open)


def _check_process(uri: str) -> None:
    """Refuse a process that was forked from one in which obstore is in use.

    Requests would hang for ever in both.
    """
    global _process  # noqa: PLW0603 - obstore also has only one runtime per process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StoreUnavailableError(
            f"{redact_uri(uri)} cannot be opened: obstore was used in process {_process} before "
            f"this one ({os.getpid()}) was forked from it, and obstore does not work after a "
            "fork. Connect only after forking, start processes by spawn "
            "(multiprocessing.set_start_method('spawn')), or use fsspec+s3://.",
            lasting=True,
        )


def _message(error: Exception) -> str:
    return str(error).partition("\n\nDebug source")[0]


def _answer(error: Exception) -> re.Match[str] | None:
    """The answer that an error repeats: its status, unless it was 200, and its body."""
    return _ANSWER_OF_SERVER.fullmatch(_message(error))


def _sentence(body: str) -> tuple[str | None, str]:
    """The service's code, and what it says, from the body of an answer."""
    code, sentence = _CODE.search(body), _MESSAGE.search(body)
    if code is None:
        shown = " ".join(body.split())
        return None, shown if len(shown) <= _LONGEST_BODY else f"{shown[:_LONGEST_BODY]}..."
    words = f" ({unescape(' '.join(sentence[1].split()))})" if sentence and sentence[1] else ""
    return code[1], f"{code[1]}{words}"
