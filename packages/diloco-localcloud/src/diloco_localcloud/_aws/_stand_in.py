"""The scripted stand-in for SageMaker."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Self

from .._server._errors import StandInError
from .._server._http import Server
from .._server._ticker import Ticker
from .._server._timeline import Timeline
from ._api._api import Api
from ._model._service import load
from ._scripted._world import TrainingWorld
from ._training._region import Region

if TYPE_CHECKING:
    from .._server._faults import Calls, Faults

# 2026-01-01T00:00:00Z, where virtual clocks begin.
EPOCH = 1767225600.0


class SageMakerStandIn:
    """An endpoint of AWS on loopback, with training jobs that a test moves on a virtual clock.

    It also serves the other services that such jobs and their launchers need: CloudWatch Logs, S3
    (by moto) and the caller's identity of STS. Needs ``diloco-localcloud[aws]``: requests are
    checked against the service models that botocore ships.

    Args:
        port: the port to listen on; 0 for a free one.
        region: the AWS region, which clients have to name.
        account: twelve digits.
        start: where the virtual clock begins, in seconds since the epoch.
        real_time: use the wall clock, which a test cannot move, instead of a virtual one.

    Attributes:
        world: the training jobs and the clock, which the test moves.
        faults: the faults that requests over HTTP meet. The verb is an operation, such as
            ``CreateTrainingJob``; the resource is a service, such as ``sagemaker``.
        calls: the requests so far, named in the same way.

    Raises:
        StandInError: no such port.

    Use ``start`` and ``stop``, or a ``with`` block; everything about it is thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        region: str = "us-east-1",
        account: str = "123456789012",
        start: float = EPOCH,
        real_time: bool = False,
    ) -> None:
        if not 0 <= port <= 65535:
            raise StandInError(f"port must be from 0 to 65535, not {port}")
        self._port = port
        self._key, self._secret = "AKIA" + secrets.token_hex(8).upper(), secrets.token_urlsafe(30)
        self._region = Region(Timeline(start, time.time if real_time else None), region, account)
        self._server: Server | None = None
        self._ticker: Ticker | None = None
        self._api = Api(self._region, self._key)
        self.world = TrainingWorld(self._region)
        self.faults: Faults = self._api.faults
        self.calls: Calls = self._api.calls

    @property
    def url(self) -> str:
        """Return its URL, such as ``http://127.0.0.1:40123``.

        Raises:
            StandInError: it is not started.
        """
        if self._server is None:
            raise StandInError(
                "the stand-in is not started; call start(), or use it in a with block"
            )
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which any client of AWS finds it.

        Raises:
            StandInError: it is not started.
        """
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self._key,
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_DEFAULT_REGION": self._region.name,
        }

    @property
    def client_options(self) -> dict[str, Any]:
        """Return keyword arguments for ``boto3.client`` and ``Session.client``.

        Raises:
            StandInError: it is not started.
        """
        return {
            "endpoint_url": self.url,
            "aws_access_key_id": self._key,
            "aws_secret_access_key": self._secret,
            "region_name": self._region.name,
        }

    def start(self) -> Self:
        """Begin to listen.

        Raises:
            StandInError: it is already running, the port is taken, or the extra ``aws`` is not
                installed.
        """
        if self._server is not None:
            raise StandInError("the stand-in is already running")
        load("sagemaker")
        self._api.s3.check()
        try:
            self._server = Server(self._api.handle, self._port, None, admit=self._api.admit)
        except OSError as wrong:
            message = (
                f"port {self._port} of 127.0.0.1 cannot be used: {wrong.strerror}; "
                "choose another, or 0 for a free one"
            )
            raise StandInError(message) from None
        self._server.start()
        if not self._region.timeline.virtual:
            self._ticker = Ticker(self._region.timeline, self._region.lock)
            self._ticker.start()
        return self

    def stop(self) -> None:
        """Close the port and all connections; may be called twice."""
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        if self._server is not None:
            self._server.stop()
            self._server = None
            self._api.s3.forget()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
