"""The stand-ins for SageMaker: scripted, and with jobs that really run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Self

from .._server._errors import StandInError
from .._server._faults import Calls, Faults
from .._server._http import Server
from .._server._service import Service
from .._server._timeline import Timeline
from ._api._api import Api
from ._model._check import load
from ._processes._machines import LocalMachines
from ._scripted import TrainingWorld
from ._training._region import KILL_SECONDS, Region

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
        real_time: bool = False,
    ) -> None:
        self._key, self._secret = "AKIA" + secrets.token_hex(8).upper(), secrets.token_urlsafe(30)
        self._region = Region(Timeline(EPOCH, time.time if real_time else None), region, account)
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

    def create_bucket(self, name: str) -> None:
        """Create a bucket of S3, as ``CreateBucket`` does."""
        self._api.s3.create(name, self._region.name)

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


class SageMakerProcesses(SageMakerStandIn):
    """AWS's API on loopback whose training jobs are processes of this machine, in real time.

    A job runs its ContainerEntrypoint with its ContainerArguments, in a folder of its own, with the
    Python of this process first on the PATH; images are not pulled. ``/opt/ml`` in them and in its
    Environment is replaced by the path of that folder, which holds the hyperparameters, the
    channels, the model (uploaded at the end if CompressionType is NONE), ``output/failure`` and the
    checkpoints, which are copied to S3 once a second and brought back after an interruption.
    Programs find the stand-in by AWS's usual variables. When the stand-in stops, or is killed, all
    processes end. Needs ``diloco-localcloud[aws]``.

    Args:
        port: the port to listen on; 0 for a free one.
        region: the AWS region, which clients have to name.
        account: twelve digits.
        env: the variables that the "image" gives every container; None for PATH (with this Python
            first), HOME, PYTHONPATH and a few more variables of this process.
        kill_seconds: the time between SIGTERM and SIGKILL; SageMaker waits 120.

    Attributes:
        world: the jobs, which a test may interrupt or stop, and the habits of the region. The
            programs themselves decide how they run.
        faults: the faults that requests over HTTP meet; see :class:`SageMakerStandIn`.
        calls: the requests so far, named in the same way, including those of the programs.

    Raises:
        StandInError: no such port, or negative seconds.

    Use ``start`` and ``stop``, or a ``with`` block; it can be started once. Thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        region: str = "us-east-1",
        account: str = "123456789012",
        env: Mapping[str, str] | None = None,
        kill_seconds: float = KILL_SECONDS,
    ) -> None:
        if kill_seconds < 0:
            raise StandInError(f"kill_seconds must be 0 or more, not {kill_seconds}")
        super().__init__(port=port, region=region, account=account, real_time=True)
        self._files, self._base = self._run_programs(env)
        self._kill_seconds = kill_seconds
        self._machines: LocalMachines | None = None
        self.world.habits.auto_start = 0.0
        self.world.habits.upload_seconds = 0.0

    def start(self) -> Self:
        """Begin to listen, and to run jobs.

        Raises:
            StandInError: it runs or ran already, the port is taken, or the extra ``aws`` is
                not installed.
        """
        super().start()
        self._machines = LocalMachines(
            self._region,
            self._api.s3,
            self._files,
            self._base,
            self.environment,
            self._kill_seconds,
        )
        with self._region.lock:
            self._region.machines = self._machines
        return self

    def _end_programs(self) -> None:
        if self._machines is not None:
            self._machines.close()

    def pid(self, name: str) -> int | None:
        """Return the process ID of the first process of a job that runs; None otherwise."""
        with self._region.lock:
            return None if self._machines is None else self._machines.pid(name)
