"""The runs below a root: launch all or nothing, find again, cancel, purge.

Keeps no state of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    LaunchError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ResultLostError,
    RunConflictError,
    UnavailableError,
)
from diloco_protocol.backend import check_ended, check_metadata, is_shortage, shown

from ._files import DamagedFileError, create_json, is_locked, open_lock, try_lock, write_json
from ._launch import SupervisorError, start_supervisor
from ._observe import observe_replica
from ._orders import Order
from ._processes import host_name, members, process_table
from ._record import RunRecord, marker, outcome_of, read_record
from ._replica import MARGIN
from ._rundir import Root, RunDir

BACKEND = "local_process"

#: Starts the supervisor of a run: see `start_supervisor`.
Supervise = Callable[..., None]

#: Seconds to wait for a launch of the same run by another process.
PATIENCE = 60.0

# Characters; the time that it takes to follow a path grows with the square of its length.
_LONGEST_PATH = 4096


def handles_of(root: Root, record: RunRecord) -> list[ReplicaHandle]:
    """Return the handles of a run, in rank order."""
    metadata = {"host": record.host, "root": str(root.path), "uid": record.uid}
    return [
        ReplicaHandle(rank, BACKEND, metadata, run_id=record.run_id, world_size=record.world_size)
        for rank in record.ranks
    ]


def find_run(root: Root, run_id: str) -> tuple[RunDir, RunRecord]:
    """Return a run that was started, by its name.

    Raises:
        ReplicaNotFoundError: There is no such run.
    """
    root.check()
    run = root.run(run_id)
    try:
        record = read_record(run)
    except InvalidRequestError as error:  # a link, or another user's: it concerns this run alone
        raise DamagedFileError(str(error)) from error
    # A run that was published and never started is a launch that died: there is no handle of it.
    if record is None or not run.started.exists():
        raise ReplicaNotFoundError(
            f"there is no run {run_id!r} below {root.path}: list_runs() names those that are there"
        )
    return root.run(run_id, record.uid), record


def check_handle(handle: ReplicaHandle, root: Root) -> None:
    """Refuse a handle that is not of this machine, or whose run is not below this root.

    A handle names a root, but does not lead to one.

    Raises:
        InvalidRequestError: It is of another machine or root, or lacks what leads to its run.
    """
    check_metadata(handle, "a run", {"host", "root", "uid"})
    host = handle.metadata["host"]
    if host != host_name():
        raise InvalidRequestError(
            f"replica {handle.rank} of run {handle.run_id!r} is on host {shown(host)}, and this is "
            f"{host_name()!r}: use the handle there (or, if this host was renamed, give it that "
            "name again)"
        )
    named = handle.metadata["root"]
    if not _same_folder(named, root):
        raise InvalidRequestError(
            f"replica {handle.rank} of run {handle.run_id!r} is below the root {shown(named)}, and "
            f"this executor has {str(root.path)!r}: use one with that root"
        )


def _same_folder(named: str, root: Root) -> bool:
    if len(named) > _LONGEST_PATH:
        return False
    try:
        return named == str(root.path) or os.path.realpath(named) == os.path.realpath(root.path)
    except (OSError, ValueError):  # no path at all, such as one with a NUL
        return False


def locate(handle: ReplicaHandle, root: Root) -> tuple[RunDir, RunRecord]:
    """Return the run that a handle belongs to.

    Raises:
        InvalidRequestError: The handle is of another machine or root, or its root is missing, so
            that nothing can be said about the replica; or the run is not this user's.
        ReplicaNotFoundError: The run was purged.
    """
    check_handle(handle, root)
    if not root.path.is_dir():
        raise InvalidRequestError(
            f"the folder {root.path} of run {handle.run_id!r} is missing on this host, "
            "so nothing is known about the run: is it on a file system that is not mounted?"
        )
    run, record = find_run(root, handle.run_id)
    if record.uid != handle.metadata["uid"] or handle.rank not in record.ranks:
        raise ReplicaNotFoundError(
            f"the run {handle.run_id!r} below {root.path} is not the one that this handle of rank "
            f"{handle.rank} names: that one was purged"
        )
    return run, record


def known_launch(root: Root, run_id: str, fingerprint: str) -> RunRecord | None:
    """Return the earlier launch of the same run, if there is one.

    Raises:
        RunConflictError: The name is taken by a launch that asked for something else.
        UnavailableError: Another process is launching it right now and does not come to an end.
    """
    root.check()
    run = root.run(run_id)
    deadline = time.monotonic() + PATIENCE
    while True:
        record = read_record(run)
        if record is None:
            return None
        locked = is_locked(run.lock)
        if run.started.exists() or locked:
            if record.fingerprint != fingerprint:
                raise RunConflictError(
                    f"run {run_id!r} exists below {root.path} and was launched with other "
                    "arguments: use another run_id, or purge it first"
                )
            if run.started.exists():
                return record
        elif _discard_dead(root, run):
            return None
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"another process has been launching run {run_id!r} for {PATIENCE:g} s"
            )
        time.sleep(0.02)


def _discard_dead(root: Root, run: RunDir) -> bool:
    """Remove a launch that died before anything was started; return False if it is alive."""
    with _locked(run) as has_lock:
        if not has_lock or run.started.exists():
            return False
        root.discard(run)
        return True


@contextlib.contextmanager
def _locked(run: RunDir, wait: float = 0.0) -> Iterator[bool]:
    """Hold the lock of the run that is at this place now.

    Yields False if another process holds it, or the run is gone.
    """
    try:
        descriptor = open_lock(run.lock)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        has_lock = try_lock(descriptor, wait=wait)
        # The lock of a run that was moved away meanwhile says nothing about the run that took its
        # place.
        try:
            same = os.fstat(descriptor).st_ino == run.lock.stat().st_ino
        except FileNotFoundError:
            same = False
        yield has_lock and same
    finally:
        os.close(descriptor)


def launch(
    root: Root, record: RunRecord, orders: Sequence[Order], supervise: Supervise = start_supervisor
) -> RunRecord:
    """Start a run: all replicas or none, and once, even if others launch it at the same time.

    Returns:
        The record of the run that exists now: this one, or that of the launcher that was first.

    Raises:
        RunConflictError: The name is taken by a launch that asked for something else.
        LaunchError: A replica could not be started; nothing is left running unless ``survivors``
            says so.
    """
    while True:
        known = known_launch(root, record.run_id, record.fingerprint)
        if known is not None:
            return known
        published = False
        try:
            with _staged(root, record) as (staged, lock):
                published = root.publish(staged, record.run_id)
                if published:
                    supervise(root.run(record.run_id, record.uid), lock, orders)
                    return record
                place = root.run(record.run_id)
                if os.path.lexists(place.path) and not place.record.exists():
                    raise RunConflictError(
                        f"{place.path} is there already, and is no run: choose another run_id, or "
                        "move it away"
                    )
        # Only the supervisor holds the lock here, so its end can be waited for.
        except SupervisorError as error:
            survivors = roll_back(root, record)
            raise LaunchError(
                f"run {record.run_id!r} could not be started: {error}", survivors
            ) from error
        except BaseException as error:  # such as Ctrl-C
            if published:
                left = ", ".join(str(handle.rank) for handle in roll_back(root, record))
                end = f"cancel_run() ends ranks {left}" if left else "what ran of it has been ended"
                error.add_note(f"run {record.run_id!r} was being started: {end}")
            raise


@contextlib.contextmanager
def _staged(root: Root, record: RunRecord) -> Iterator[tuple[RunDir, int]]:
    """Yield the whole directory of a run, not yet visible, and the descriptor that holds its lock.

    The lock is held from before the run is visible. So a run that was not started, and whose lock
    is free, is a launch that has died.
    """
    with contextlib.ExitStack() as made:
        try:
            staged = root.stage(record.uid)
            made.callback(root.discard, staged)
            lock = open_lock(staged.lock)
            made.callback(os.close, lock)
            try_lock(lock)
            os.mkfifo(staged.wake, 0o600)
            for rank in record.ranks:
                staged.replica(rank).path.mkdir(mode=0o700)
            write_json(staged.record, record.to_dict())
        except OSError as error:
            raise InvalidRequestError(
                f"runs cannot be written below root={str(root.path)!r}: {error}",
                retryable=is_shortage(error),
            ) from error
        yield staged, lock


def roll_back(root: Root, record: RunRecord) -> list[ReplicaHandle]:
    """End what a failed or interrupted launch has started.

    Returns:
        The replicas that could not be ended.
    """
    run = root.run(record.run_id, record.uid)
    # Once the supervisor is gone, another launcher may remove what it left and take the name.
    with contextlib.suppress(OSError, BackendError):
        for rank in record.ranks:
            with contextlib.suppress(OSError, BackendError):
                _mark(run, rank)
        _withdraw(run)  # a later launch must not be given what is ended here
        run.wake_supervisor()
        deadline = time.monotonic() + record.grace + 2 * MARGIN
        while is_locked(run.lock) and time.monotonic() < deadline:
            time.sleep(0.02)
        _withdraw(run)  # the supervisor may have been about to mark it as started
    table = process_table()
    alive = [
        handle
        for handle in handles_of(root, record)
        if members(record.marker(handle.rank), (), table)
    ]
    if not run.started.exists():
        with contextlib.suppress(OSError, BackendError):  # a replica has spoilt it meanwhile
            if not alive:
                _discard_dead(root, run)
            elif _is_here(run):
                run.mark_started()  # its handles lead there
    return alive


def _withdraw(run: RunDir) -> None:
    """Hide a run from everything that looks for it, unless another one has taken its place."""
    with contextlib.suppress(OSError, BackendError):
        if _is_here(run):
            run.started.unlink(missing_ok=True)


def _is_here(run: RunDir) -> bool:
    record = read_record(run)
    return record is not None and record.uid == run.uid


def _mark(run: RunDir, rank: int) -> None:
    create_json(run.replica(rank).cancel, {"at": time.time(), "by": os.getpid()})


def cancel(
    run: RunDir, record: RunRecord, rank: int, supervise: Supervise = start_supervisor
) -> None:
    """Ask for the end of one replica.

    Returns once the request is on disk and a supervisor will see it.

    Raises:
        BackendError: There is no supervisor and none could be started. The mark stays; cancel
            again.
    """
    if observe_replica(run, record, rank).state.terminal:
        return
    try:
        _mark(run, rank)
    except FileNotFoundError:
        return  # purged at this moment, so it had ended
    except OSError as error:
        raise BackendError(
            f"the cancel of replica {rank} in {run.path} could not be written down: {error}",
            retryable=True,
        ) from error
    run.wake_supervisor()
    if is_locked(run.lock) or observe_replica(run, record, rank).state.terminal:
        return
    lock = open_lock(run.lock)
    try:
        supervise(run, lock, (), recover=True)
    except SupervisorError as error:
        raise BackendError(
            f"no supervisor could be started to cancel replica {rank}: {error}", retryable=True
        ) from error
    finally:
        os.close(lock)


def purge(root: Root, run: RunDir, record: RunRecord) -> None:
    """Remove a run that has ended.

    Raises:
        InvalidRequestError: A replica has not ended.
        UnavailableError: The supervisor has not ended yet.
        OSError: The operating system did not let it be removed.
    """
    busy = [rank for rank in record.ranks if not observe_replica(run, record, rank).state.terminal]
    check_ended(record.run_id, busy)
    with _locked(run, wait=5.0) as has_lock:
        now = read_record(run)
        if now is None or now.uid != record.uid:
            return  # another process was quicker, and there may be a new run of that name
        if not has_lock:
            raise UnavailableError(
                f"the supervisor of run {record.run_id!r} has not ended yet: try again"
            )
        root.discard(run)


def check_over(handle: ReplicaHandle) -> None:
    """Refuse to take a replica for ended because its folder is gone, while its processes live.

    Raises:
        BackendError: The folder was removed from outside.
    """
    if left := members(marker(handle.metadata["uid"], handle.rank)):
        raise BackendError(
            f"the folder of replica {handle.rank} of run {handle.run_id!r} was removed from "
            "outside, and these processes of the replica still run: "
            f"{', '.join(map(str, sorted(left)))}. End them by hand"
        )


def result_of(run: RunDir, record: RunRecord, rank: int) -> Any:
    """Return what the entrypoint of a successful replica returned.

    Raises:
        ResultLostError: The file that held it is gone or damaged.
    """
    attempt = observe_replica(run, record, rank).attempt
    outcome, problem = outcome_of(run.replica(rank).attempt(attempt))
    if outcome is None:
        raise ResultLostError(
            problem or f"the outcome of replica {rank} in {run.path} has been removed from outside"
        )
    return outcome.result
