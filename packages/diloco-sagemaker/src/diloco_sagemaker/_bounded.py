"""An answer of AWS is bounded in bytes and in time, while it is read: botocore reads whatever comes, for as long as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

ANSWER_BYTES = 64 * 1024 * 1024
_TIMES = 10  # as long as one piece of an answer may take, the whole may take
_PIECE = 1 << 16


def bound_answers(client: Any, seconds: float, *, streams: bool) -> None:
    """Have a client of boto3 raise an error of botocore where an answer is too large, or takes too long; may be repeated.

    Args:
        client: The client.
        seconds: How long a piece of an answer may take.
        streams: Whether to bound what it streams, too: a client that was handed in may have other users.
    """
    endpoint = getattr(client, "_endpoint", None)  # no event of botocore comes before it reads
    if endpoint is not None and not isinstance(endpoint.http_session, _Session):
        endpoint.http_session = _Session(
            endpoint.http_session, max(seconds, 0.001) * _TIMES, streams=streams
        )


class _Session:
    """botocore's HTTP session, with answers that are bounded."""

    def __init__(self, session: Any, seconds: float, *, streams: bool) -> None:
        self._session = session
        self._seconds = seconds
        self._streams = streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: Any) -> Any:
        streamed, request.stream_output = request.stream_output, True
        answer = self._session.send(request)
        if not streamed or self._streams or answer.status_code >= 300:
            answer.raw = _Body(answer.raw, request, self._seconds)
        if not streamed:
            answer.content  # noqa: B018 - reads it
        return answer


class _Body:
    """What is left of an answer, given as soon as it comes."""

    def __init__(self, raw: Any, request: Any, seconds: float) -> None:
        self._raw = raw
        self._request = request
        self._left = ANSWER_BYTES
        self._until = time.monotonic() + seconds
        self._read = getattr(raw, "read1", raw.read)  # older ones wait until a piece is full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def read(self, size: int = _PIECE) -> bytes:
        from botocore import exceptions as of_botocore  # slow to import
        from urllib3.exceptions import HTTPError

        try:
            piece: bytes = self._read(size) or b""
        except HTTPError as error:
            raise of_botocore.ConnectionClosedError(
                error=error, request=self._request, endpoint_url=self._request.url
            ) from error
        self._left -= len(piece)
        if self._left < 0 or time.monotonic() > self._until:
            self._raw.close()
            text = (
                f"it has more than {ANSWER_BYTES} bytes" if self._left < 0 else "it takes too long"
            )
            raise of_botocore.ResponseStreamingError(error=text)
        return piece

    def stream(self) -> Iterator[bytes]:
        while piece := self.read():
            yield piece
