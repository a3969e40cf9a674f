"""The common part of all stores behind a network: retries, creates and clear errors.

Creates are right even if an answer got lost. A :class:`._driver.Driver` sends single requests and
says what its errors mean; :class:`RemoteStore` makes a store from a driver.
"""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..._errors import CorruptedObjectError, ObjectNotFoundError, StoreError, StoreUnavailableError
from ..._redact import redact_uri
from ..._retry import Downtime, Notices, Retries
from .._api import RECORD_BYTES, Buffer, Requests, is_key, too_large
from .._guard import endpoint, without_secrets, without_secrets_in
from .._reread import in_parallel
from .._transfer import PART_BYTES, Transfer
from ._blocks import BlockReader, Transfers, threads
from ._driver import ANEW, Driver, Sending, TooLargeError, Verdict, advice
from ._uploads import MOST_PARTS, UploadBlocks, blocks_of

T = TypeVar("T")

_PROBE_SECONDS = 5.0
# How long new credentials are waited for. Processes that write them, and their services, may be
# away for a while.
_RENEWAL_SECONDS = 300.0
# A request that a sleeping process had signed long ago is refused like one of a machine with a
# wrong clock.
_CLOCK_TRIES = 3
_PROBE_READS = 3
_HICCUP_SECONDS = 10.0

_log = logging.getLogger("diloco_core")


class RemoteStore:
    """A prefix of a store behind a driver; see :class:`._api.Store`. Thread-safe.

    A request that fails for a reason that may pass is tried again while :attr:`patience` lasts,
    with jitter. A part of an upload has 5 MiB. All open readers and uploads together hold about
    as many bytes as the budget of :attr:`background` says.

    Args:
        uri: The prefix; messages show it without the secrets that may be in it.
        driver: Sends the requests.
        retries: How often requests that fail are tried again.
        reading: Whether the store is only read: then it need not be writable.
        transfer: How much is transferred at once; if left out, the defaults apply.
        background: Given a number of connections, makes the executor that sends requests in the
            background; replaced in simulations.
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
        self.requests = Requests()
        self.background = Transfers(transfer or Transfer(), background, self.uri, driver.copies)
        self._probe(reading)

    def once(self) -> RemoteStore:
        """Return this store, but every request is sent once, and counts towards no downtime."""
        store = copy.copy(self)
        store._retries = replace(self._retries, repeats=False)  # noqa: SLF001
        return store

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step; see :meth:`._api.Store.put`."""
        return self._write("write", key, parts)

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists; see :meth:`._api.Store.create`.

        "Exists" may be the answer to the second try of a request whose first try has succeeded. So
        an object of less than 5 MiB is read and compared: if it holds the very same bytes, it
        counts as written by this call. A larger object counts as written by another call.
        """
        try:
            self._write("create", key, [data] if isinstance(data, bytes) else data)
        except _Exists as exists:
            return exists.data is not None and self._is_there(key, exists.data)
        return True

    @property
    def downtime(self) -> float:
        """Seconds spent waiting for an unavailable store; see :attr:`._api.Store.downtime`."""
        return self._downtime.seconds()

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
                    f"{self.uri}/{key}: {stop - start} bytes from {start} on were requested, and "
                    f"the store sent {len(data)}"
                )
            return data

        return BlockReader(fetch, size, head, f"{self.uri}/{key}", self.background)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes; see :meth:`._api.Store.list`."""
        try:
            keys = self._do("list", prefix, lambda: self.driver.list(prefix))
        except ObjectNotFoundError:
            return {}
        return {key: keys[key] for key in sorted(keys) if key.startswith(prefix) and is_key(key)}

    # Nothing to reuse
    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:  # noqa: ARG002
        """Delete objects; see :meth:`._api.Store.delete`."""
        all_keys = list(keys)
        requests = [all_keys] if self.driver.deletes_many else [[key] for key in all_keys]
        deletions = [
            partial(self._do, "delete", keys[0], partial(self.driver.delete, keys))
            for keys in requests
            if keys
        ]
        if len(deletions) == 1:
            deletions.pop()()  # here, so that one that hangs takes no thread from others
        for _ in in_parallel(self, deletions, self.background.settings.connections):
            pass

    def close(self) -> None:
        """End the threads; repeatable, and the store may still be used.

        Drivers close idle connections by themselves.
        """
        # The threads may be those of the process that this one was forked from.
        if self.background.is_own_process():
            self.background.close()

    def _write(self, verb: str, key: str, parts: Iterable[Buffer]) -> int:
        """Write (or create) a small object in one request, a large one in parts."""
        self.background.check_process()
        if isinstance(parts, (list, tuple)):  # the parts do not change until they are written
            views = [memoryview(part).cast("B") for part in parts if len(part)]
            size = sum(map(len, views))
            if size < PART_BYTES:
                self._send_small(verb, key, b"".join(views))
            else:
                self._do(verb, key, lambda: self._send_large(verb, key, UploadBlocks(iter(views))))
                self._count_parts(verb, size)
            return size
        # An object that is created in one request is held in memory until that succeeded.
        held_whole = verb == "create" and not self.driver.copies
        size = 0

        def counted() -> Iterator[memoryview]:
            nonlocal size
            for block in blocks_of(parts, PART_BYTES):
                size += len(block)
                if held_whole:
                    self.background.hold(len(block))
                yield block

        try:
            blocks = counted()
            first = next(blocks, memoryview(b""))
            if len(first) < PART_BYTES:
                self._send_small(verb, key, first)
            else:
                source = UploadBlocks(blocks, first)
                del first  # so that the block is released when it has been sent
                self._send_large(verb, key, source, copies=0 if held_whole else 1)
                self._count_parts(verb, size)
        finally:
            if held_whole:
                self.background.hold(-size)
        return size

    def _count_parts(self, verb: str, size: int) -> None:
        """Count what the driver has sent by itself: parts, one before them and one after them."""
        if verb == "write" or self.driver.copies:
            self.requests.count(verb, -(-size // PART_BYTES) + 1)

    def _send_small(self, verb: str, key: str, data: Buffer) -> None:
        exclusive = verb == "create"
        self._do(verb, key, lambda: self.driver.put(key, data, exclusive=exclusive), data)

    def _send_large(self, verb: str, key: str, source: UploadBlocks, copies: int = 0) -> None:
        """Send an object in parts; ``copies`` is 1 if its blocks are copies, which take memory."""
        with self.background.room(self.driver.copies or copies) as at_once:
            try:
                attempt = partial(self._do, verb, key)
                sending = Sending(verb == "create", attempt, at_once)
                self.driver.upload(key, source, sending)
            except Exception as error:
                if source.error is not None:
                    raise source.error from None
                if isinstance(error, (StoreError, _Exists)):
                    raise
                failed = error
            else:
                return
        try:
            raise self._named(failed, verb, key, None, anew=True) from without_secrets_in(
                failed, self._secret
            )
        finally:
            # Otherwise the error and this frame would hold each other, and with them the bytes that
            # were sent.
            del failed, source

    def _is_there(self, key: str, data: Buffer) -> bool:
        try:
            return self.get(key) == data
        except (ObjectNotFoundError, CorruptedObjectError):
            return False  # deleted since, or larger than any that is read in one piece

    def _do(
        self,
        verb: str,
        key: str,
        act: Callable[[], T],
        created: Buffer | None = None,
        largest: int = RECORD_BYTES,
    ) -> T:
        """Send a request, and send it again while it fails for a reason that may pass."""
        self.background.check_process()
        # Over a network, single failures are normal and not worth a message.
        notices = Notices(_log.warning, self._retries.clock, after=_HICCUP_SECONDS)

        clock = self._retries.clock
        renewing: float | None = None
        skewed = 0

        def again(error: Exception) -> bool:
            nonlocal renewing, skewed
            if isinstance(error, StoreUnavailableError) and error.anew:
                notices.failed(str(error))
                return True
            if isinstance(error, (TooLargeError, StoreError, _Exists)):
                return False
            verdict, text = self.driver.judge(error)
            if verdict is Verdict.EXPIRED:
                renewing = clock() if renewing is None else renewing
                if clock() - renewing > _RENEWAL_SECONDS:
                    return False
                self.driver.renew()
            elif verdict is Verdict.CLOCK:
                skewed += 1
                if skewed > _CLOCK_TRIES:
                    return False
            elif not verdict.passes:
                return False
            shown = without_secrets(text, self._secret)
            message = f"cannot {verb} {key!r} in {self.uri}: {shown}"
            if self._retries.repeats:
                _log.info("trying again: %s", message)
            notices.failed(message)
            return True

        def counted() -> T:
            self.requests.count(verb)
            return act()

        try:
            return self._retries.run(counted, again, self.patience, self._downtime)
        except TooLargeError as error:
            raise too_large(f"{self.uri}/{key}", error.size, largest) from None
        except (StoreError, _Exists):
            raise
        # Raised below as an error of ours, without the driver's as its context
        except Exception as error:  # noqa: BLE001
            failed = error
        try:
            raise self._named(failed, verb, key, created) from self._cause(failed)
        finally:
            # Otherwise the error and this frame would hold each other, and with them the bytes that
            # were sent.
            del failed

    def _cause(self, error: Exception) -> BaseException | None:
        """Return what is shown as the cause; None of an answer that is frequent and says it all."""
        if self.driver.judge(error)[0] in {Verdict.EXISTS, Verdict.MISSING}:
            return None
        return without_secrets_in(error, self._secret)

    def _named(
        self, error: Exception, verb: str, key: str, created: Buffer | None, *, anew: bool = False
    ) -> Exception:
        """Return the error of the store for one of the driver.

        ``created`` is what should have been created, if it was sent in one request; with ``anew``,
        an object may be sent again from its beginning.
        """
        verdict, text = self.driver.judge(error)
        if verdict is Verdict.EXISTS and verb == "create":
            return _Exists(created)
        if verdict is Verdict.MISSING and verb not in {"create", "write"}:
            return ObjectNotFoundError(f"there is no object {key!r} in {self.uri}")
        shown = without_secrets(text, self._secret)  # takes long, and most errors end above
        if anew and verdict in ANEW:
            if verdict is Verdict.EXPIRED:
                self.driver.renew()
            return StoreUnavailableError(
                f"cannot {verb} object {key!r} in {self.uri}: {shown}", anew=True
            )
        again = verdict.passes and self._retries.repeats
        tried = f"It was tried again for up to {self.patience:g} s." if again else ""
        hints = (tried, advice(verdict, verb, self.driver.name))
        return StoreUnavailableError(
            " ".join(
                filter(None, (f"cannot {verb} object {key!r} in {self.uri}: {shown}.", *hints))
            ),
            lasting=not verdict.passes,
        )

    def _probe(self, reading: bool) -> None:
        """Try each operation once.

        The patience is short, so that a store that is down is reported soon.
        """
        patience, self.patience = self.patience, _PROBE_SECONDS
        key, token = f"probes/{secrets.token_hex(8)}", secrets.token_bytes(8)
        try:
            if reading:
                self.list("probes/")
                return
            self.put(key, [token])
            # Read it several times, since a bit may flip in transit.
            readable = any(self.get(key) == token for _ in range(_PROBE_READS))
            listed = self.list("probes/")
            self.delete([key])
        except StoreError as error:
            acts = "listed" if reading else "written, read back, listed and emptied"
            shown_endpoint = "" if self.near else f" (endpoint: {endpoint(self._secret)})"
            raise StoreUnavailableError(
                f"{self.uri} cannot be {acts}: {error}{shown_endpoint}"
            ) from error
        finally:
            self.patience = patience
        if not readable or listed.get(key) != len(token):
            raise StoreUnavailableError(
                f"{self.uri} does not show an object that was just written there, so replicas "
                "could not find each other's objects: use a store that shows new objects at once"
            )


class _Exists(Exception):  # noqa: N818 - never leaves this file
    """The key exists.

    ``data`` is what should have been written, if that was sent in one request.
    """

    def __init__(self, data: Buffer | None) -> None:
        super().__init__()
        self.data = data
