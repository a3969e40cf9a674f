"""The part that all stand-ins share: a port on loopback, a clock, and a folder for programs."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from ._container import image_environment
from ._errors import StandInError
from ._timeline import Ticker, Timeline


class Listening(Protocol):
    """A server that listens."""

    @property
    def port(self) -> int:
        """Return the port."""

    def stop(self) -> None:
        """Close the port and all connections."""


class Service:
    """A stand-in on loopback: ``start``, ``stop`` or a ``with`` block; thread-safe."""

    _scheme = "http"

    def __init__(self, port: int, timeline: Timeline, changed: threading.Condition) -> None:
        if not 0 <= port <= 65535:
            raise StandInError(f"port must be from 0 to 65535, not {port}")
        self._port = port
        self._clock = timeline, changed
        self._server: Listening | None = None
        self._ticker: Ticker | None = None
        self._folder: Path | None = None
        self._over = False

    def _run_programs(self, env: Mapping[str, str] | None) -> tuple[Path, dict[str, str]]:
        """Plan a folder, which exists from ``start`` to ``stop``; a second start is refused then.

        Returns:
            The folder, and the environment of every image: ``env`` if it is given.
        """
        self._folder = Path(tempfile.gettempdir()) / f"stand-in-{secrets.token_hex(8)}"
        return self._folder, image_environment() if env is None else dict(env)

    @property
    def url(self) -> str:
        """Return its URL, such as ``http://127.0.0.1:40123``.

        Raises:
            StandInError: it is not started.
        """
        return f"{self._scheme}://127.0.0.1:{self._running().port}"

    def _running(self) -> Listening:
        if self._server is None:
            words = "the stand-in is not started; call start(), or use it in a with block"
            raise StandInError(words)
        return self._server

    def _listen(self) -> Listening:
        raise NotImplementedError

    def start(self) -> Self:
        """Begin to listen, and to run programs if it runs any.

        Raises:
            StandInError: it is already running, or has run programs before; the port is taken; or
                something is missing that it needs (an extra, or a certificate).
        """
        if self._server is not None:
            raise StandInError("the stand-in is already running")
        if self._over:
            raise StandInError("the stand-in has been stopped; make a new one")
        try:
            self._server = self._listen()
        except OSError as wrong:
            words = f"{wrong.strerror}; choose another, or 0 for a free one"
            message = f"port {self._port} of 127.0.0.1 cannot be used: {words}"
            raise StandInError(message) from None
        if self._folder is not None:
            self._folder.mkdir(mode=0o700)
        timeline, changed = self._clock
        if not timeline.virtual:
            self._ticker = Ticker(timeline, changed)
            self._ticker.start()
        return self

    def stop(self) -> None:
        """Close the port, end every program and delete the files; may be called twice."""
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        self._end_programs()
        if self._folder is not None:
            self._over = True
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end_programs(self) -> None:
        """End every program that it has started."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
