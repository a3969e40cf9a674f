"""Runs each training job as a process, below a shim that ends all processes that it started."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..._server._container import Command, Container
from ..._server._output import read_lines
from .._api._s3 import S3
from .._training._job import Job
from .._training._region import Region
from ._folder import JobFolder

_SYNC_SECONDS = 1.0


class _Life:
    """One run of a job on a machine."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.over = threading.Event()
        self.container: Container | None = None
        self.gone: Callable[[], None] | None = None


class LocalMachines:
    """The machines of a region; called under the region's lock, unless a method says otherwise.

    Args:
        region: the region whose jobs they run.
        s3: the store of the jobs' data.
        folder: the folder for the jobs' files; it exists as long as they do.
        base: the environment that the "image" gives every container.
        connect: the variables with which a program finds the stand-in.
        kill_seconds: the time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        region: Region,
        s3: S3,
        folder: Path,
        base: Mapping[str, str],
        connect: Mapping[str, str],
        kill_seconds: float,
    ) -> None:
        self._region = region
        self._s3 = s3
        self._folder = folder
        self._base = base
        self._connect = connect
        self._kill_seconds = kill_seconds
        self._number = itertools.count(1)
        self._lives: dict[str, _Life] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def start(self, job: Job) -> None:
        """Start a job's program."""
        if self._closed:
            return
        # The name alone would not do: a new job may have the name of a deleted one.
        home = self._folder / f"{job.name}-{next(self._number)}"
        home.mkdir(parents=True)
        life = self._lives[job.name] = _Life(JobFolder(job, home, self._s3))
        try:
            self._begin(job, life)
        except Exception as error:  # noqa: BLE001 - the job has to end, whatever went wrong
            life.over.set()
            self._ended(job, life, {"event": "refused", "message": str(error)})

    def _begin(self, job: Job, life: _Life) -> None:
        life.folder.fill()
        algorithm = job.request["AlgorithmSpecification"]
        words = [*(algorithm.get("ContainerEntrypoint") or ())]
        words += algorithm.get("ContainerArguments") or ()
        if not words:
            event = {"event": "refused", "message": "the image has no entrypoint here"}
            self._ended(job, life, event)
            return
        wanted = (job.request.get("Environment") or {}).items()
        names = {"TRAINING_JOB_NAME": job.name, "TRAINING_JOB_ARN": job.arn}
        variables = {key: life.folder.rewritten(text) for key, text in wanted}
        env = {**self._base, **self._connect, **names, **variables}
        stream = f"{job.name}/algo-1-{int(self._region.timeline.now())}"
        argv = [life.folder.rewritten(word) for word in words]
        self._thread(lambda: self._sync(life))
        life.container = Container(
            Command(argv, env, life.folder.work),
            lambda event: self._told(job, life, event),
            # Both streams share one log, but each adds only whole lines, as with a container
            # runtime.
            lambda pipes: read_lines(pipes, lambda _, text: self._write(stream, text)),
        )

    def end(self, job: Job, gone: Callable[[], None]) -> None:
        """Send SIGTERM to a job's first process, and SIGKILL to all of them after a while."""
        life = self._lives.get(job.name)
        if life is None or life.container is None:
            gone()
            return
        before, life.gone = life.gone, gone
        if before is None:
            container = life.container
            container.term()
            self._region.timeline.after(self._kill_seconds, container.kill)
            self._region.lock.notify_all()

    def pid(self, name: str) -> int | None:
        """Return the PID of a job's first process; None before it has one and after its end."""
        life = self._lives.get(name)
        return None if life is None or life.container is None else life.container.pid

    def close(self) -> None:
        """End every job's processes, and wait until none is left; not called under the lock."""
        with self._region.lock:
            self._closed = True
            lives = list(self._lives.values())
        containers = [life.container for life in lives if life.container is not None]
        for container in containers:
            container.kill()
        for container in containers:
            container.join()
        for life in lives:
            life.over.set()
        for thread in list(self._threads):
            thread.join()

    def _thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="training-job", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _told(self, job: Job, life: _Life, event: Mapping[str, Any]) -> None:
        """Record that a container has started or ended; called from the container's thread."""
        if event["event"] == "started":
            return
        life.over.set()
        life.folder.sync()
        with self._region.lock:
            self._ended(job, life, event)

    def _ended(self, job: Job, life: _Life, event: Mapping[str, Any]) -> None:
        if self._lives.get(job.name) is life:
            del self._lives[job.name]
        if self._closed:
            return
        if event["event"] == "refused":
            failure = f"ClientError: the container could not be started: {event['message']}"
        else:
            failure = life.folder.reason(event["code"]) if event["code"] else ""
        if life.gone is not None:
            life.folder.upload()  # the output of a stopped job is kept, too
            life.gone()
            self._region.lock.notify_all()
            return
        self._region.finish(job, failure or life.folder.upload())

    def _sync(self, life: _Life) -> None:
        while not life.over.wait(_SYNC_SECONDS):
            with contextlib.suppress(OSError):  # a file vanished meanwhile
                life.folder.sync()

    def _write(self, stream: str, text: bytes) -> None:
        with self._region.lock:
            now = self._region.timeline.now()
            self._region.logs.write(stream, now, text.decode(errors="replace"))
