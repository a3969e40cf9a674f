"""Limit the bytes and the time of an answer of AWS while it is read.

botocore itself has no limit: it reads everything that comes, for as long as it comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco_protocol.backend import in_time

ANSWER_BYTES = 64 * 1024 * 1024
_PIECE = 1 << 16


def bound_answers(client: Any, up: Callable[[], float]) -> None:
    """Make a boto3 client raise a botocore error for an answer that is too large or too slow.

    May be called again with the same client.

    Args:
        client: The client.
        up: Returns the time (of ``time.monotonic``) by which the answer to a request that is sent
            now must be complete.
    """
    endpoint = client._endpoint  # noqa: SLF001 - botocore has no event before it reads
    session = endpoint.http_session
    if isinstance(session, _Session):
        return
    pools = session._pool_classes_by_scheme.items()  # noqa: SLF001 - botocore has no other way
    session._pool_classes_by_scheme = {  # noqa: SLF001
        scheme: in_time(pool, up) for scheme, pool in pools
    }
    session._manager.pool_classes_by_scheme = session._pool_classes_by_scheme  # noqa: SLF001
    endpoint.http_session = _Session(session, up)


def bound_clients(session: Any, up: Callable[[], float]) -> None:
    """Limit the answers of all clients that a boto3 session will make.

    These include the clients that the session makes by itself to get credentials.
    """

    class Bounded:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            bound_answers(self, up)

    session.events.register(
        "creating-client-class", lambda base_classes, **_: base_classes.insert(0, Bounded)
    )


class _Session:
    """botocore's HTTP session, with limited answers."""

    def __init__(self, session: Any, up: Callable[[], float]) -> None:
        self._session = session
        self._up = up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: Any) -> Any:
        streamed, request.stream_output = request.stream_output, True
        up = self._up()
        answer = self._session.send(request)
        answer.raw = _Body(answer.raw, up)
        if not streamed:
            answer.content  # noqa: B018 - this reads the answer
        return answer


class _Body:
    """The rest of an answer, passed on as soon as it arrives."""

    def __init__(self, raw: Any, up: float) -> None:
        self._raw = raw
        self._left = ANSWER_BYTES
        self._up = up
        self._read = getattr(raw, "read1", raw.read)  # older versions wait for a full piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def read(self, size: int = _PIECE) -> bytes:
        from botocore.exceptions import ResponseStreamingError  # slow to import
        from urllib3.exceptions import HTTPError

        try:
            piece: bytes = self._read(size) or b""
        except HTTPError as error:
            raise ResponseStreamingError(error=error) from error
        self._left -= len(piece)
        if self._left < 0 or time.monotonic() > self._up:
            self._raw.close()
            text = (
                f"it has more than {ANSWER_BYTES} bytes"
                if self._left < 0
                else "it comes too slowly"
            )
            raise ResponseStreamingError(error=text)
        return piece

    def stream(self) -> Iterator[bytes]:
        while piece := self.read():
            yield piece
