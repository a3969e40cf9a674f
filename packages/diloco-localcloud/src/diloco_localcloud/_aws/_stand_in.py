"""The scripted stand-in for SageMaker."""

from __future__ import annotations

import secrets
import time
from typing import Any

from .._server._faults import Calls, Faults
from .._server._http import Server
from .._server._service import Service
from .._server._timeline import Timeline
from ._api._api import Api
from ._model._check import load
from ._scripted import TrainingWorld
from ._training._region import Region

# 2026-01-01T00:00:00Z, where virtual clocks begin.
EPOCH = 1767225600.0


class SageMakerStandIn(Service):
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
        self._key, self._secret = "AKIA" + secrets.token_hex(8).upper(), secrets.token_urlsafe(30)
        self._region = Region(Timeline(start, time.time if real_time else None), region, account)
        super().__init__(port, self._region.timeline, self._region.lock)
        self._api = Api(self._region, self._key)
        self.world = TrainingWorld(self._region)
        self.faults: Faults = self._api.faults
        self.calls: Calls = self._api.calls

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

    def _listen(self) -> Server:
        load("sagemaker")
        self._api.s3.check()
        server = Server(self._api.handle, self._port, None, admit=self._api.admit)
        server.start()
        return server

    def stop(self) -> None:
        """Close the port, end every program and delete the files; may be called twice."""
        super().stop()
        self._api.s3.forget()
