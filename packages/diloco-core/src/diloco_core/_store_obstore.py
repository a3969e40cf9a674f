"""Requests to S3 through obstore, which is faster than s3fs and needs no botocore."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from diloco_protocol import MissingDependencyError

from ._errors import ConfigurationError
from ._store_blocks import HEAD_BYTES
from ._store_remote import PART_BYTES, PARTS_AT_ONCE, TooLargeError, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore.store import RetryConfig

    from ._store import Buffer

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class ObstoreDriver:
    """A prefix of an S3 bucket; see :class:`._store_remote.Driver`. Thread-safe.

    Credentials, region and endpoint come from obstore's own chain: ``AWS_*`` variables, web identity, container and
    instance roles; where the variables hold no key and boto3 is installed, from boto3's chain, which knows profiles too.
    Source: https://developmentseed.org/obstore/latest/api/store/aws/.

    An object that is created exclusively is one request, whatever its size: obstore has no conditional multipart upload. It
    is held in memory, and S3 allows 5 GiB of it.
    """

    name = "obstore"
    near = False
    exclusive = True

    def __init__(self, uri: str) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError as error:
            raise MissingDependencyError(f"{uri!r} needs obstore: pip install 'diloco-core[obstore]'") from error
        bucket, _, prefix = uri.partition("://")[2].partition("/")
        if not bucket:
            raise ConfigurationError(f"{uri!r} names no bucket: an S3 prefix is written s3://bucket/folder")
        self._obstore = obstore
        self._errors = exceptions

        def connect(timeout: str, retries: RetryConfig) -> S3Store:
            return S3Store(
                bucket,
                prefix=prefix.strip("/") or None,
                # Our own checksums go with every payload; hashing it once more for the signature costs as much as sending.
                unsigned_payload=True,
                client_options={"timeout": timeout, "connect_timeout": "5s", "allow_http": _plain_http()},
                retry_config=retries,
                credential_provider=_boto3_chain(),
            )

        # Small requests are repeated by RemoteStore; the parts of an upload only obstore can send again.
        self._little = connect("20s", {"max_retries": 0})
        self._bulk = connect("300s", {"max_retries": 8, "retry_timeout": timedelta(minutes=3)})

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object."""
        store = self._little if len(data) <= HEAD_BYTES else self._bulk
        self._obstore.put(store, key, data, mode="create" if exclusive else "overwrite", use_multipart=False)

    def upload(self, key: str, blocks: Iterator[Buffer], *, exclusive: bool, attempt: Callable[..., None]) -> None:
        """Write a large object in parts, or in one request where it is to be created."""
        if exclusive:
            whole = list(blocks)
            attempt(lambda: self._obstore.put(self._bulk, key, iter(whole), mode="create", use_multipart=False))
        else:
            self._obstore.put(self._bulk, key, blocks, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def get(self, key: str, largest: int) -> Buffer:
        """Read a whole object; its size comes before its bytes."""
        found = self._obstore.get(self._little, key)
        if found.meta["size"] > largest:
            raise TooLargeError(found.meta["size"])
        return memoryview(found.bytes())

    def head(self, key: str) -> tuple[int, Buffer]:
        """Size and first bytes of an object, with one request."""
        try:
            found = self._obstore.get(self._little, key, options={"range": (0, HEAD_BYTES)})
        except self._errors.GenericError as error:
            if _status(error) != 416:
                raise
            return self._obstore.head(self._little, key)["size"], b""  # an empty object has no first byte
        return found.meta["size"], memoryview(found.bytes())

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""
        return memoryview(self._obstore.get_range(self._bulk, key, start=start, end=stop))

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        return {item["path"]: item["size"] for batch in self._obstore.list(self._little, prefix) for item in batch}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand with one request."""
        self._obstore.delete(self._little, keys)

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """What an error means."""
        text = str(error).partition("\n\nDebug source")[0]
        status, codes = _status(error), _CODE.findall(text)
        if codes:
            text = f"{text.partition('<?xml')[0].partition('<Error>')[0].strip()} {codes[0]}"
        if "/latest/" in text:
            text += " (where obstore asks for the credentials of a machine: the environment holds none)"
        if "NoSuchBucket" in codes:
            return Verdict.NO_BUCKET, text
        if isinstance(error, FileNotFoundError):
            return Verdict.MISSING, text
        if isinstance(error, self._errors.AlreadyExistsError):
            # obstore says so at a conflict of two writers too, and then S3 asks for another try.
            return (Verdict.TRANSIENT if status == 409 else Verdict.EXISTS), text
        if isinstance(error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)):
            return Verdict.FORBIDDEN, text
        if not isinstance(error, self._errors.GenericError):
            return Verdict.PERMANENT, text
        if status in {401, 403} or "Credential" in text:
            return Verdict.FORBIDDEN, text
        if status is not None and 400 <= status < 500 and status not in {408, 409, 425, 429}:
            return Verdict.PERMANENT, text
        return Verdict.TRANSIENT, text

    def close(self) -> None:
        """Nothing to do: idle connections close by themselves."""


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _plain_http() -> bool:
    """Whether the environment names an endpoint without TLS: then that is what is meant."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def _boto3_chain() -> Any:
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except (ImportError, ValueError):  # no boto3, or it finds nothing: obstore's own chain may
        return None
