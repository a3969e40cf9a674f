"""The verbs, on run directories."""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_protocol import (
    Backoff,
    BaseExecutor,
    Capabilities,
    InvalidRequestError,
    LogQuery,
    Option,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    RunJournal,
    RunRequest,
    environment,
)
from diloco_protocol.backend import check_seconds

from . import _logs, _runs
from ._check import check_entrypoint
from ._environment import import_path, inherited
from ._gpus import available_gpus, share_out
from ._identity import host_name, pid_namespace
from ._launch import start_supervisor
from ._observe import observe_replica
from ._orders import Setting, check_request, fingerprint, make_orders, show_orders
from ._record import RunRecord, read_record
from ._replica import Order
from ._rundir import Root, default_root


class LocalProcessExecutor(BaseExecutor):
    """Runs replicas as processes of this machine, each with a session and a run directory of its own.

    All that is known about a run is in its directory below ``root``, so any executor in any process of the machine
    (and of the user) answers for any handle. A small supervisor process per run, detached from the launcher, enforces
    timeouts, finishes cancels, ends whole process trees and restarts failed attempts. Safe to share between threads.

    GPUs: ``gpu=None`` leaves ``CUDA_VISIBLE_DEVICES`` as it is. ``"2"`` or ``"any:2"`` give each replica two of the
    machine's GPUs, ``"A100"`` one and ``"A100:2"`` two of a model, disjoint among the replicas of the launch. Not
    honoured and therefore refused: ``cpu``, ``memory``, ``secrets``, ``spot=True``.

    Args:
        root: Where the runs are; default ``$XDG_STATE_HOME/diloco`` or ``~/.local/state/diloco``. Must be on a local disk.
        python: The replicas' interpreter.
        env: Variables for every launch; the launch's own ``env`` wins.
        inherit_env: How much of the launcher's environment replicas inherit: True for all, False for nothing, or names
            and patterns such as ``["PATH", "AWS_*"]``.
        cwd: The replicas' working directory; default the launcher's at the launch.
        pythonpath: Folders in which replicas find modules, ahead of their installation; default the launcher's own
            import path, so that a module beside the launching script is found.
        gpus: The GPUs to share out, as ``CUDA_VISIBLE_DEVICES`` names them; default that variable, else nvidia-smi.
        grace: Seconds between SIGTERM and SIGKILL when a replica is ended.
        run_id: Prefix of the names of runs that are not named by the caller.
        journal: A second place for launches and ends to be written down, which outlives `purge`.
        backoff: Pauses of `collect`, with its clock and sleep.
        clock: Unix seconds, for tests.
        sleep: Sleeps so many seconds between two looks at a followed log, for tests.

    Raises:
        InvalidRequestError: A value is not allowed.
    """

    backend_name = _runs.BACKEND
    supports_inter_replica_network = True
    capabilities = Capabilities(
        cancel_scope="replica",
        result_channel="a file in the run directory",
        log_streams=("combined", "stderr", "stdout"),
    )

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        python: str | os.PathLike[str] = sys.executable,
        env: Mapping[str, str] | None = None,
        inherit_env: bool | Iterable[str] = True,
        cwd: str | os.PathLike[str] | None = None,
        pythonpath: Iterable[str | os.PathLike[str]] | None = None,
        gpus: Sequence[str] | None = None,
        grace: float = 10.0,
        run_id: str | None = None,
        journal: RunJournal | None = None,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(
            run_id=run_id,
            journal=journal,
            backoff=backoff or Backoff(first=0.02, factor=1.5, cap=0.5),
            env=env,
        )
        for name, value in (
            ("inherit_env", inherit_env),
            ("pythonpath", pythonpath),
            ("gpus", gpus),
        ):
            if isinstance(value, str):
                raise InvalidRequestError(
                    f"{name} must be a list, not the text {value!r}: write [{value!r}]"
                )
        if gpus is not None and len(set(gpus)) < len(gpus):
            raise InvalidRequestError(f"gpus={list(gpus)!r} names a GPU twice")
        self._root = Root(Path(os.path.abspath(root if root is not None else default_root())))  # noqa: PTH100
        self._python = os.fspath(python)
        self._inherit_env = inherit_env if isinstance(inherit_env, bool) else tuple(inherit_env)
        self._cwd = cwd
        self._pythonpath = None if pythonpath is None else tuple(pythonpath)
        self._gpus = None if gpus is None else tuple(gpus)
        self._grace = check_seconds("grace", grace)
        self._clock = clock
        self._sleep = sleep

    def options(self) -> list[Option]:
        """What the constructor takes."""
        return [
            Option("root", "path", "$XDG_STATE_HOME/diloco", "where the runs are; on a local disk"),
            Option("python", "path", "this interpreter", "the replicas' interpreter"),
            Option("env", "text to text", "{}", "variables for every launch"),
            Option(
                "inherit_env",
                "bool or list of patterns",
                "True",
                "the part of this environment that replicas get",
            ),
            Option("cwd", "path", "the current one", "the replicas' working directory"),
            Option(
                "pythonpath", "list of paths", "this import path", "where replicas find modules"
            ),
            Option(
                "gpus",
                "list of text",
                "CUDA_VISIBLE_DEVICES or nvidia-smi",
                "the GPUs to share out",
            ),
            Option("grace", "seconds", "10", "between SIGTERM and SIGKILL"),
            Option("run_id", "text", "run", "prefix of the names of runs"),
        ]

    # --- launching ---

    def _check_request(self, request: RunRequest) -> None:
        check_request(request)

    def _setting(self) -> Setting:
        # Looked up at every launch, since folder, environment and import path of this process may change.
        found = shutil.which(self._python)
        if found is None:
            raise InvalidRequestError(
                f"python={self._python!r} is not an interpreter that can be started"
            )
        cwd = os.path.abspath(self._cwd if self._cwd is not None else Path.cwd())  # noqa: PTH100
        if not Path(cwd).is_dir():
            raise InvalidRequestError(f"the working directory cwd={cwd!r} is not a folder")
        python = os.path.abspath(found)  # noqa: PTH100  # a link into a virtual environment must stay one
        folders = tuple(import_path(self._pythonpath, python))
        return Setting(python, cwd, folders, self._grace, inherited(os.environ, self._inherit_env))

    def _orders(self, request: RunRequest, setting: Setting) -> list[Order]:
        devices = share_out(request.gpu, len(request.ranks), lambda: available_gpus(self._gpus))
        return make_orders(request, setting, devices)

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        setting = self._setting()
        run = self._root.run(request.run_id)
        return show_orders(run, self._orders(request, setting), setting.base)

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        setting = self._setting()
        cwd = None if self._cwd is None else setting.cwd
        folders = None if self._pythonpath is None else setting.folders
        digest = fingerprint(request, setting.python, cwd, folders, setting.grace)
        known = _runs.known_launch(self._root, request.run_id, digest)
        if known is not None:
            return _runs.handles_of(self._root, known)
        orders = self._orders(request, setting)
        own = environment(request.specs()[0])
        check_entrypoint(
            request.entrypoint, python=setting.python, env={**orders[0].env, **own}, cwd=setting.cwd
        )
        record = RunRecord(
            uid=uuid.uuid4().hex,
            run_id=request.run_id,
            fingerprint=digest,
            ranks=request.ranks,
            world_size=request.world_size,
            grace=setting.grace,
            timeout=request.timeout,
            max_restarts=request.max_restarts,
            created_at=self._clock(),
            host=host_name(),
            namespace=pid_namespace(),
            labels=dict(request.labels),
        )
        return _runs.handles_of(
            self._root, _runs.launch(self._root, record, orders, self._supervise)
        )

    #: Starts the supervisor of a run.
    _supervise = staticmethod(start_supervisor)

    # --- watching ---

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        statuses = {}
        for handle in handles:
            try:
                run, record = _runs.locate(handle)
            except ReplicaNotFoundError:
                continue
            statuses[handle] = observe_replica(run, record, handle.rank)
        return statuses

    def _result(self, handle: ReplicaHandle) -> Any:
        run, record = _runs.locate(handle)
        return _runs.result_of(run, handle.rank, observe_replica(run, record, handle.rank))

    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        run, record = _runs.locate(handle)
        replica = run.replica(handle.rank)
        if query.n_lines is not None:
            return iter(_logs.tail(replica, query.n_lines, query.streams))

        def terminal() -> bool:
            return observe_replica(run, record, handle.rank).state.terminal

        return _logs.iterate(
            replica,
            terminal,
            follow=query.follow,
            since=query.since,
            until=query.until,
            regex=query.regex,
            streams=query.streams,
            sleep=self._sleep,
            clock=self._clock,
        )

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        try:
            run, record = _runs.locate(handle)
        except ReplicaNotFoundError:
            return  # purged, so it had ended
        _runs.cancel(run, record, handle.rank, self._supervise)

    def _purge(self, handle: ReplicaHandle) -> None:
        try:
            run, record = _runs.locate(handle)
        except ReplicaNotFoundError:
            return
        _runs.purge(Root(Path(handle.metadata["root"])), run, record)

    def _list_runs(self) -> list[str]:
        runs = [self._root.run(name) for name in self._root.run_ids()]
        records = [read_record(run) for run in runs if run.started.exists()]
        known = sorted(
            (record.created_at, record.run_id) for record in records if record is not None
        )
        return [run_id for _, run_id in known]

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        _, record = _runs.find_run(self._root, run_id)
        return _runs.handles_of(self._root, record)
