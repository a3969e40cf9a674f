"""What every store behind a network needs: tries that are repeated, creates whose answer got lost, errors with a name.

A :class:`Driver` sends single requests and says what its errors mean; :class:`RemoteStore` makes a store of it.
"""

from __future__ import annotations

import logging
import secrets
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..._errors import CorruptedObjectError, ObjectNotFoundError, StoreError, StoreUnavailableError
from ..._redact import redact_uri
from ..._retry import Downtime, Notices, Retries
from .._api import RECORD_BYTES, is_key, too_large
from .._guard import endpoint, without_secrets, without_secrets_in
from .._parallel import in_parallel
from .._transfer import PART_BYTES, Transfer
from ._blocks import BlockReader, Transfers, threads
from ._uploads import MOST_PARTS, UploadBlocks, Uploads, blocks_of, creates_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from .._api import Buffer

T = TypeVar("T")

_PROBE_SECONDS = 5.0
_PROBE_READS = 3
_HICCUP_SECONDS = 10.0

_log = logging.getLogger("diloco_core")


class Verdict(Enum):
    """What an error of a driver means."""

    MISSING = auto()
    """There is no such object."""
    EXISTS = auto()
    """There is one already."""
    NO_BUCKET = auto()
    """There is no such bucket."""
    FORBIDDEN = auto()
    """No credentials, wrong ones, or ones that may not do this."""
    TRANSIENT = auto()
    """It may go through the next time. Whether it has taken effect is not known."""
    PERMANENT = auto()
    """It will not go through the next time either."""


class Driver(Protocol):
    """Single requests to one prefix; keys are relative to it. Thread-safe. Every error is the driver's own."""

    name: str
    near: bool
    exclusive: bool
    """Whether an exclusive write is one step, with nothing between looking and writing."""
    deletes_many: bool
    """Whether it removes many objects with one request."""
    copies: int
    """How often it holds a part of an upload that is on its way; 0 where it sends what it was given."""

    def put(self, key: str, data: Buffer, *, exclusive: bool) -> None:
        """Write a small object, only if there is none where ``exclusive``."""
        ...

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
        """Write a large object in one step, whose blocks can be had once; several parts go up at the same time.

        ``attempt(act)`` calls ``act`` until it succeeds, for what can be repeated. What only the driver can repeat, it
        repeats for ``patience`` seconds.
        """
        ...

    def get(self, key: str, largest: int) -> Buffer:
        """Read a whole object.

        Raises:
            TooLargeError: It has more than ``largest`` bytes; not many of them were read.
        """
        ...

    def head(self, key: str) -> tuple[int, Buffer]:
        """An object's size in bytes, and its first bytes where they come with the same request."""
        ...

    def range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of an object."""
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes in bytes."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that do not exist are passed over."""
        ...

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """What an error means, and its text without what only a developer of the driver wants to read."""
        ...

    def close(self) -> None:
        """Let go of connections; repeatable, and the driver may still be used."""
        ...


class TooLargeError(Exception):
    """An object is larger than what may be read in one piece. Raised by drivers; never leaves the store."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


class RemoteStore:
    """A prefix of a store behind a driver; see :class:`._api.Store`. Thread-safe.

    What fails for a reason that may pass is tried again while :attr:`patience` lasts, with jitter. A part of an upload is
    5 MiB. All open readers and uploads together hold about :attr:`budget` bytes of what is read ahead or on its way up.

    Args:
        uri: The prefix; it is shown without the secrets that may be in it.
        driver: Sends the requests.
        retries: How often what fails is tried again.
        reading: Whether it is only read: then it need not be writable.
        transfer: How much is under way at once; left out, as is usual.
        background: Makes what sends so many requests in the background: threads, or something else in simulations.
    """

    def __init__(
        self,
        uri: str,
        driver: Driver,
        retries: Retries | None = None,
        *,
        reading: bool = False,
        transfer: Transfer | None = None,
        background: Callable[[int], Executor] = threads,
    ) -> None:
        self.uri = redact_uri(uri).rstrip("/")
        self._secret = uri
        self.retries = True
        self.largest = None if driver.near else MOST_PARTS * PART_BYTES
        self.near = driver.near
        self.exclusive = driver.exclusive
        self.driver = driver
        self._retries = retries or Retries()
        self.patience = self._retries.patience
        self._downtime = Downtime(self._retries.clock)
        self.transfer = transfer or Transfer()
        self._transfers = Transfers(self.transfer, background, self.uri)
        self._uploads = Uploads(self.transfer, self._transfers)
        self._probe(reading)

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step; see :meth:`._api.Store.put`."""
        return self._write(key, parts, exclusive=False)

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists; see :meth:`._api.Store.create`.

        "Exists" may be the answer to the second try of a request whose first went through. So an object of less than 5 MiB
        is read and compared: what is there with the very same bytes counts as written by this call. A larger one counts as
        another's.
        """
        try:
            self._write(key, [data] if isinstance(data, bytes) else data, exclusive=True)
        except _Exists as exists:
            return exists.data is not None and self._is_there(key, exists.data)
        return True

    @property
    def downtime(self) -> float:
        """Seconds for which an unavailable store was waited for; see :attr:`._api.Store.downtime`."""
        return self._downtime.seconds()

    @property
    def creates_at_once(self) -> int:
        """How many objects may go up beside other work; see :attr:`._api.InBackground.creates_at_once`."""
        if self.driver.copies:
            return max(1, self._transfers.budget // self.transfer.least_upload())
        return creates_at_once(self.transfer)

    @property
    def budget(self) -> int:
        """Memory for reading ahead; see :attr:`._api.InBackground.budget`."""
        return self._transfers.budget

    @budget.setter
    def budget(self, size: int) -> None:
        self._transfers.budget = size

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole object; see :meth:`._api.Store.get`."""
        return bytes(self._do("read", key, lambda: self.driver.get(key, largest), largest=largest))

    def open(self, key: str, size: int | None = None) -> BlockReader:
        """Open an object for ranged reads; see :meth:`._api.Store.open`."""
        head: Buffer = b""
        if size is None:
            size, head = self._do("read", key, lambda: self.driver.head(key))

        def fetch(start: int, stop: int) -> Buffer:
            data = self._do("read", key, lambda: self.driver.range(key, start, stop))
            if len(data) != stop - start:
                raise CorruptedObjectError(
                    f"{self.uri}/{key}: {len(data)} of {stop - start} bytes came back"
                )
            return data

        return BlockReader(fetch, size, head, f"{self.uri}/{key}", self._transfers)

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Do something in the background; see :meth:`._api.InBackground.submit`."""
        return self._transfers.submit(act)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes; see :meth:`._api.Store.list`."""
        try:
            keys = self._do("list", prefix, lambda: self.driver.list(prefix))
        except ObjectNotFoundError:
            return {}
        return {key: keys[key] for key in sorted(keys) if key.startswith(prefix) and is_key(key)}

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:  # noqa: ARG002 - nothing to reuse
        """Remove objects; see :meth:`._api.Store.delete`."""
        gone = list(keys)
        requests = [gone] if self.driver.deletes_many else [[key] for key in gone]
        for _ in in_parallel(
            self,
            (partial(self._delete, keys) for keys in requests if keys),
            self.transfer.connections,
        ):
            pass

    def close(self) -> None:
        """End the threads and let go of connections; repeatable, and the store may still be used."""
        if not self._transfers.is_own_process():
            return  # they are the other process's
        self._transfers.close()
        self.driver.close()

    def _write(self, key: str, parts: Iterable[Buffer], *, exclusive: bool) -> int:
        """Write a small object at once, a large one by upload."""
        self._transfers.check_process()
        if isinstance(
            parts, (list, tuple)
        ):  # all of it is there, and stays as it is until it is written
            views = [memoryview(part).cast("B") for part in parts if len(part)]
            size = sum(map(len, views))
            if size < PART_BYTES:
                self._send_small(key, b"".join(views), exclusive)
            else:
                self._send_large(key, UploadBlocks(iter(views)), exclusive)
            return size
        whole = (
            exclusive and not self.driver.copies
        )  # sent in one request, and held until that is through
        size = 0

        def counted() -> Iterator[memoryview]:
            nonlocal size
            for block in blocks_of(parts, PART_BYTES):
                size += len(block)
                if whole:
                    self._transfers.hold(len(block))
                yield block

        try:
            blocks = counted()
            first = next(blocks, memoryview(b""))
            if len(first) < PART_BYTES:
                self._send_small(key, first, exclusive)
            else:
                source = UploadBlocks(blocks, first)
                del first  # the source lets go of a block when it has been sent
                self._send_large(key, source, exclusive, copies=0 if whole else 1)
        finally:
            if whole:
                self._transfers.hold(-size)
        return size

    def _send_small(self, key: str, data: Buffer, exclusive: bool) -> None:
        verb = "create" if exclusive else "write"
        self._do(verb, key, lambda: self.driver.put(key, data, exclusive=exclusive), data)

    def _send_large(self, key: str, source: UploadBlocks, exclusive: bool, copies: int = 0) -> None:
        """Send an object in parts; ``copies`` is 1 where its blocks are buffers of their own."""
        verb = "create" if exclusive else "write"

        def attempt(act: Callable[[], None]) -> None:
            self._do(verb, key, act)

        with self._uploads.room(self.driver.copies or copies) as at_once:
            try:
                self.driver.upload(
                    key,
                    source,
                    exclusive=exclusive,
                    attempt=attempt,
                    patience=self.patience,
                    at_once=at_once,
                )
            except Exception as error:
                if source.error is not None:
                    raise source.error from None
                if isinstance(error, (StoreError, _Exists)):
                    raise
                failed = error
            else:
                return
        try:
            raise self._named(failed, verb, key, None) from without_secrets_in(failed, self._secret)
        finally:
            del failed, source

    def _delete(self, keys: Sequence[str]) -> None:
        self._do("delete", keys[0], lambda: self.driver.delete(keys))

    def _is_there(self, key: str, data: Buffer) -> bool:
        try:
            return self.get(key) == data
        except ObjectNotFoundError:  # it has been there, and was deleted since
            return False

    def _do(
        self,
        verb: str,
        key: str,
        act: Callable[[], T],
        created: Buffer | None = None,
        largest: int = RECORD_BYTES,
    ) -> T:
        """Send a request, again and again while it fails for a reason that may pass."""
        self._transfers.check_process()
        # Single failures are everyday life over a network.
        notices = Notices(_log.warning, self._retries.clock, after=_HICCUP_SECONDS)

        def again(error: Exception) -> bool:
            if isinstance(error, (TooLargeError, StoreError)):
                return False
            verdict, text = self._judge(error)
            if verdict is Verdict.TRANSIENT:
                message = f"cannot {verb} {key!r} in {self.uri}: {text}"
                _log.info("trying again: %s", message)
                notices.failed(message)
            return verdict is Verdict.TRANSIENT

        try:
            return self._retries.run(act, again, self.patience, self._downtime)
        except TooLargeError as error:
            raise too_large(f"{self.uri}/{key}", error.size, largest) from None
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - named below, where the driver's own error is no part of it
            failed = error
        try:
            raise self._named(failed, verb, key, created) from without_secrets_in(
                failed, self._secret
            )
        finally:
            del (
                failed
            )  # or it would hold this frame, which holds it, and with them the bytes that were sent

    def _judge(self, error: Exception) -> tuple[Verdict, str]:
        verdict, text = self.driver.judge(error)
        return verdict, without_secrets(text, self._secret)

    def _named(self, error: Exception, verb: str, key: str, created: Buffer | None) -> Exception:
        verdict, text = self._judge(error)
        if verdict is Verdict.EXISTS and verb == "create":
            return _Exists(created)
        if verdict is Verdict.MISSING and verb != "create":
            return ObjectNotFoundError(f"there is no object {key!r} in {self.uri}")
        advice = {
            Verdict.NO_BUCKET: " The bucket does not exist: create it, or correct the URI.",
            Verdict.FORBIDDEN: " Access was denied: see that this process's credentials (those that "
            f"{self.driver.name} finds by itself) may put, get, list and delete below the prefix.",
            Verdict.TRANSIENT: f" It was tried again for up to {self.patience:g} s.",
        }.get(verdict, "")
        return StoreUnavailableError(
            f"cannot {verb} object {key!r} in {self.uri}: {text}.{advice}",
            lasting=verdict is not Verdict.TRANSIENT,
        )

    def _probe(self, reading: bool) -> None:
        """Do once what will be done. What is down should not take a minute to say so."""
        patience, self.patience = self.patience, _PROBE_SECONDS
        key, token = f"probes/{secrets.token_hex(8)}", secrets.token_bytes(8)
        try:
            if reading:
                self.list("probes/")
                return
            self.put(key, [token])
            # A bit may flip on its way.
            shown = any(self.get(key) == token for _ in range(_PROBE_READS))
            listed = self.list("probes/")
            self.delete([key])
        except StoreError as error:
            acts = "listed" if reading else "written, read back, listed and emptied"
            where = "" if self.near else f" (endpoint: {endpoint(self._secret)})"
            raise StoreUnavailableError(f"{self.uri} cannot be {acts}: {error}{where}") from error
        finally:
            self.patience = patience
        if not shown or listed.get(key) != len(token):
            raise StoreUnavailableError(
                f"{self.uri} does not show what was just written there: replicas could not meet in such a store"
            )


class _Exists(Exception):  # noqa: N818 - never leaves this file
    """The key exists. ``data`` is what should have been written, where it went in one request."""

    def __init__(self, data: Buffer | None) -> None:
        super().__init__()
        self.data = data
