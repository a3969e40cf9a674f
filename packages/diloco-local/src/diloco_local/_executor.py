"""The executor: the verbs of the protocol, on run directories."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_protocol import (
    Backoff,
    BaseExecutor,
    Capabilities,
    InvalidRequestError,
    LogQuery,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    RunRequest,
    state_folder,
)
from diloco_protocol.backend import RESULT_BYTES, is_run_id, shown, takes

from . import _logs, _runs
from ._check import check_entrypoint
from ._environment import find_program, import_path, inherited
from ._files import check_own_folder, system_errors
from ._gpus import available_gpus, share_out
from ._launch import start_supervisor
from ._observe import observe_replica
from ._options import LocalOptions
from ._orders import Order, Setting, check_request, fingerprint, make_orders, show_orders
from ._processes import host_name, pid_namespace
from ._record import RunRecord, rendezvous_of
from ._rundir import Root


class LocalProcessExecutor(BaseExecutor):
    """Runs replicas as processes of this machine, each with its own session and run directory.

    All that is known about a run is in its directory below ``root``, so any executor with that
    root, in any process of the same user on the same machine, answers for its handles. A small
    supervisor process per run, detached from the launcher, enforces timeouts, finishes cancels,
    ends whole process trees and restarts failed attempts. Safe to share between threads.

    GPUs: ``gpu=None`` leaves ``CUDA_VISIBLE_DEVICES`` as it is. ``"2"`` or ``"any:2"`` give each
    replica two of the machine's GPUs, ``"A100"`` one and ``"A100:2"`` two of a model, disjoint
    among the replicas of the launch. Not honoured and therefore refused: ``cpu``, ``memory``,
    ``secrets``, ``spot=True``, ``DILOCO_LOCAL_REPLICA`` in ``env``.

    Its arguments are the fields of :class:`LocalOptions`, all by name.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
    """

    backend_name = _runs.BACKEND
    supports_inter_replica_network = True
    capabilities = Capabilities(
        cancel_scope="replica",
        result_channel="a file in the run directory",
        max_result_bytes=RESULT_BYTES,
        log_streams=("combined", "stderr", "stdout"),
    )

    options_class = LocalOptions
    replica_word = "process"

    @takes(LocalOptions)
    def __init__(self, **options: Any) -> None:
        chosen = LocalOptions(**options)
        super().__init__(**chosen.of_base(Backoff(first=0.02, factor=1.5, cap=0.5)))
        self._options = chosen
        with system_errors():
            root = state_folder() if chosen.root is None else chosen.root
            self._root = Root(Path(os.path.abspath(root)))  # noqa: PTH100

    def _check_handle(self, handle: ReplicaHandle) -> None:
        _runs.check_handle(handle, self._root)

    # --- launching ---

    def _check_request(self, request: RunRequest) -> None:
        check_request(request)

    def _setting(self) -> Setting:
        # Looked up at every launch, since folder, environment and import path of this process may
        # change.
        chosen = self._options
        program = find_program(chosen.python)
        if program is None:
            raise InvalidRequestError(
                f"python={os.fspath(chosen.python)!r} is not an interpreter that can be started"
            )
        cwd = os.path.abspath(chosen.cwd if chosen.cwd is not None else Path.cwd())  # noqa: PTH100
        if not os.path.isdir(cwd):  # noqa: PTH112  # False also for what no path can be
            raise InvalidRequestError(f"the working directory cwd={shown(cwd)} is not a folder")
        # A link into a virtual environment must stay a link
        python = os.path.abspath(program)  # noqa: PTH100
        folders = tuple(import_path(chosen.pythonpath, python, None if chosen.cwd is None else cwd))
        base = inherited(os.environ, chosen.inherit_env)
        return Setting(python, cwd, folders, chosen.grace, base)

    def _orders(self, request: RunRequest, setting: Setting) -> list[Order]:
        named, cuda_devices = self._options.gpus, request.env.get("CUDA_VISIBLE_DEVICES")
        if request.gpu is not None and named is not None and cuda_devices is not None:
            raise InvalidRequestError(
                f"CUDA_VISIBLE_DEVICES={shown(cuda_devices)} in env has no effect beside "
                f"gpus={shown(list(named))}: leave one of them out"
            )
        devices = share_out(
            request.gpu,
            len(request.ranks),
            lambda: available_gpus(self._options.gpus, {**os.environ, **request.env}),
        )
        return make_orders(request, setting, devices)

    @system_errors()
    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        setting = self._setting()
        run = self._root.run(request.run_id)
        return show_orders(run, self._orders(request, setting), setting.base)

    def _where(self) -> str:
        return str(self._root.path)

    @system_errors()
    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        setting = self._setting()
        cwd = None if self._options.cwd is None else setting.cwd
        folders = None if self._options.pythonpath is None else setting.folders
        digest = fingerprint(request, setting.python, cwd, folders, setting.grace)
        known = _runs.known_launch(self._root, request.run_id, digest)
        if known is not None:
            logging.getLogger("diloco_local").warning(
                "run %r was launched before, in the same way: its replicas are returned. Nothing "
                "is started, even if the trainer has changed. A new run needs another run_id",
                request.run_id,
            )
            return _runs.handles_of(self._root, known)
        orders = self._orders(request, setting)
        check_entrypoint(orders[0])
        record = RunRecord(
            uid=uuid.uuid4().hex,
            run_id=request.run_id,
            fingerprint=digest,
            ranks=request.ranks,
            world_size=request.world_size,
            cohort=request.cohort,
            grace=setting.grace,
            timeout=request.timeout,
            max_restarts=request.max_restarts,
            created_at=self._options.clock(),
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

    @system_errors()
    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        statuses = {}
        for handle in handles:
            try:
                run, record = _runs.locate(handle, self._root)
                status = observe_replica(run, record, handle.rank)
                _runs.locate(handle, self._root)  # if purged meanwhile, its files say nothing
            except ReplicaNotFoundError:
                continue
            statuses[handle] = status
        return statuses

    @system_errors()
    def _result(self, handle: ReplicaHandle) -> Any:
        run, record = _runs.locate(handle, self._root)
        return _runs.result_of(run, record, handle.rank)

    @system_errors()
    def _rendezvous(self, handle: ReplicaHandle) -> str | None:
        run, _ = _runs.locate(handle, self._root)
        replica = run.replica(handle.rank)
        check_own_folder(replica.path)
        uri = rendezvous_of(replica.attempt(1))
        _runs.locate(handle, self._root)  # if purged meanwhile, a missing file says nothing
        return uri

    @system_errors()
    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        run, record = _runs.locate(handle, self._root)
        replica = run.replica(handle.rank)
        check_own_folder(replica.path)
        if query.n_lines is not None:
            return self._read(handle, iter(_logs.tail(replica, query.n_lines, query.streams)))

        def terminal() -> bool:
            _runs.locate(handle, self._root)  # a later run of that name says nothing of this one
            return observe_replica(run, record, handle.rank).state.terminal

        sleep, clock = self._options.sleep, self._options.clock
        lines = _logs.iterate(replica, terminal, query, sleep=sleep, clock=clock)
        return self._read(handle, lines)

    def _read(self, handle: ReplicaHandle, lines: Iterator[str]) -> Iterator[str]:
        with system_errors():
            yield from lines
            _runs.locate(handle, self._root)  # if purged meanwhile, they may not be all

    # --- ending and finding ---

    @system_errors()
    def _stop(self, handle: ReplicaHandle) -> None:
        try:
            run, record = _runs.locate(handle, self._root)
        except ReplicaNotFoundError:
            _runs.check_over(handle)  # it was purged, so it had ended
            return
        _runs.cancel(run, record, handle.rank, self._supervise)

    def _spelled(
        self, handle: ReplicaHandle, known: Sequence[ReplicaHandle]
    ) -> list[ReplicaHandle]:
        return [other for other in known if other.metadata["uid"] == handle.metadata["uid"]]

    @system_errors()
    def _siblings(self, handle: ReplicaHandle) -> list[ReplicaHandle]:
        try:
            _, record = _runs.locate(handle, self._root)
        except ReplicaNotFoundError:
            return [handle]
        return [replace(handle, rank=rank) for rank in record.ranks]

    @system_errors()
    def _purge(self, handle: ReplicaHandle) -> None:
        try:
            run, record = _runs.locate(handle, self._root)
        except ReplicaNotFoundError:
            _runs.check_over(handle)
            # Remove what an interrupted purge of the run has left.
            self._root.empty_trash(handle.metadata["uid"])
            return
        _runs.purge(self._root, run, record)

    @system_errors()
    def _list_runs(self) -> list[str]:
        known = []
        for name in filter(is_run_id, self._root.run_ids()):
            with contextlib.suppress(OSError):  # it was not started, or is being removed
                known.append((self._root.run(name).started.stat().st_mtime_ns, name))
        return [name for _, name in sorted(known)]

    @system_errors()
    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        _, record = _runs.find_run(self._root, run_id)
        return _runs.handles_of(self._root, record)
