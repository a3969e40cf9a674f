"""The files below ``/opt/ml`` of a job.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo.html describes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..._server._files import open_regular
from .._api._s3 import S3
from .._training._job import Job

ROOT = "/opt/ml"
_REASON_BYTES = 1024


def place(uri: str) -> tuple[str, str]:
    """Return the bucket and the prefix of ``s3://bucket/prefix``, without slashes at its ends."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix.strip("/")


class JobFolder:
    """The folder of one run of a job on a machine. Not thread-safe.

    Args:
        job: the job.
        home: where the folder is made; nothing is there yet.
        s3: the store that its data come from and go to.
    """

    def __init__(self, job: Job, home: Path, s3: S3) -> None:
        self._job = job
        self._s3 = s3
        self.root = home / "opt/ml"
        self.work = home / "root"
        self._synced: dict[str, tuple[int, int]] = {}
        for name in ("input/config", "input/data", "model", "output", "checkpoints"):
            (self.root / name).mkdir(parents=True)
        self.work.mkdir()

    def fill(self) -> None:
        """Write the files that SageMaker writes before the program starts."""
        request = self._job.request
        config = self.root / "input/config"
        (config / "hyperparameters.json").write_text(json.dumps(request.get("HyperParameters", {})))
        host = "algo-1"
        resources = {"current_host": host, "hosts": [host], "network_interface_name": "eth0"}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        for channel in request.get("InputDataConfig") or ():
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            self._fetch(uri, self.root / "input/data" / channel["ChannelName"])
        if self._checkpoints is not None:
            self._fetch(self._checkpoints, self.root / "checkpoints")
            self._synced = {name: _state(path) for name, path in _files(self.root / "checkpoints")}

    def rewritten(self, text: str) -> str:
        """Return a text of the request with the real path in place of ``/opt/ml``."""
        return text.replace(ROOT, str(self.root))

    def sync(self) -> None:
        """Copy checkpoints that have changed to S3, as SageMaker does all the time."""
        if self._checkpoints is None:
            return
        bucket, prefix = place(self._checkpoints)
        for name, path in _files(self.root / "checkpoints"):
            state = _state(path)
            if self._synced.get(name) != state:
                self._s3.write(bucket, "/".join(filter(None, (prefix, name))), _content(path))
                self._synced[name] = state

    def upload(self) -> str:
        """Copy the model to S3; return why that failed, or an empty text."""
        output = self._job.request["OutputDataConfig"]
        bucket, prefix = place(output["S3OutputPath"])
        if output.get("CompressionType") != "NONE":
            return ""  # the archive that SageMaker would make of it is not supported
        for name, path in _files(self.root / "model"):
            key = "/".join(filter(None, (prefix, self._job.name, "output/model", name)))
            if not self._s3.write(bucket, key, _content(path)):
                return f"ClientError: Artifact upload failed: the bucket {bucket} does not exist"
        return ""

    def reason(self, code: int) -> str:
        """Return the FailureReason of a program that has exited with a code other than 0."""
        end = f", exit code: {code}"
        try:
            with open_regular(self.root / "output/failure") as file:
                text = file.read(4 * _REASON_BYTES).decode(errors="replace")
        except OSError:
            text = ""
        return f"AlgorithmError: {text[: _REASON_BYTES - len('AlgorithmError: ' + end)]}{end}"

    @property
    def _checkpoints(self) -> str | None:
        config = self._job.request.get("CheckpointConfig") or {}
        uri: str | None = config.get("S3Uri")
        return uri

    def _fetch(self, uri: str, folder: Path) -> None:
        bucket, prefix = place(uri)
        for key, data in self._s3.read(bucket, prefix).items():
            name = key.removeprefix(prefix).strip("/")
            path = folder.joinpath(*(part for part in name.split("/") if part not in ("", "..")))
            if path != folder:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(folder).as_posix(), path


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
