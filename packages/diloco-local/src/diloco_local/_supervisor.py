"""The watchdog of a run: one small process, and a guardian that takes its place if it is killed.

Started by the launcher as ``python -I -S -c ... main()`` in a session of its own, with the run's
lock already held on an inherited descriptor and its orders on stdin. It forks twice::

    launcher ── waits for ── [exits at once]
                                └─ guardian ── waits for ── supervisor ── runner of rank 0, 1, ...

Both hold the lock, so a lock that is free means that both are gone. Both are subreapers: an orphan
of a replica falls to the supervisor; when the supervisor dies, its runners fall to the guardian,
which goes on in its place with their exit codes still to be read. When both are killed, the runners
go on by themselves (they enforce the timeout and write their outcomes), and the next `cancel`
starts a new supervisor that finishes what it finds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco_protocol import BackendError, InvalidRequestError, Reason
from diloco_protocol.backend import adopt_orphans

from ._files import open_own, say, try_lock, write_json
from ._logs import SAMPLE_SECONDS
from ._oom import OomWatch
from ._orders import Order
from ._processes import ProcessEntry, below
from ._record import RunRecord, read_record
from ._replica import Replica, noted
from ._rundir import RunDir

#: Seconds between two looks while processes are being ended.
ENDING_SECONDS = 0.03


class Supervisor:
    """Runs the replicas of one run until all have ended."""

    def __init__(self, run: RunDir, record: RunRecord, orders: Sequence[Order]) -> None:
        self._run = run
        self._record = record
        self._statuses: dict[int, int] = {}
        self._ended_strays = 0
        self._terminated = False
        by_rank = {order.rank: order for order in orders}
        oom = OomWatch()
        self.replicas = [
            Replica(
                run.replica(rank),
                record.marker(rank),
                record,
                by_rank.get(rank),
                self._reap,
                oom,
                self._strays,
                self._count_ended_strays,
            )
            for rank in record.ranks
        ]
        self._wakers = _open_wakers(run, self)

    def terminate(self) -> None:
        """Have all replicas ended, since the supervisor itself was told to end."""
        self._terminated = True

    def start_all(self) -> None:
        """Start every replica, or none.

        Raises:
            OSError: One could not be started; those before it have been ended.
        """
        try:
            for replica in self.replicas:
                replica.start()
            self._run.mark_started()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End every replica and wait until all are gone."""
        self._terminated = True
        for replica in self.replicas:
            replica.patient = False
            replica.give_up()
        self.loop()

    def adopt_all(self) -> None:
        """Go on where another supervisor was killed."""
        for replica in self.replicas:
            replica.adopt()

    def loop(self) -> None:
        """Watch until every replica has its terminal record."""
        sampled = 0.0
        while True:
            self._collect()
            for replica in self.replicas:
                with noted():
                    if self._terminated:
                        replica.stop(Reason.STOPPED_EXTERNALLY)
                    replica.step()
            if time.monotonic() - sampled >= SAMPLE_SECONDS:
                sampled = time.monotonic()
                for replica in self.replicas:
                    replica.sample()
            if all(replica.done for replica in self.replicas):
                return
            ending = any(replica.being_ended for replica in self.replicas)
            self._rest(ENDING_SECONDS if ending else SAMPLE_SECONDS)

    def _rest(self, seconds: float) -> None:
        ready, _, _ = select.select(self._wakers, [], [], seconds)
        for descriptor in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 4096)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if any(replica.is_runner(pid) for replica in self.replicas):
                self._statuses[pid] = status
            else:
                self._ended_strays += 1

    def _count_ended_strays(self) -> int:
        self._collect()
        return self._ended_strays

    def _reap(self, pid: int) -> int | None:
        self._collect()
        return self._statuses.pop(pid, None)

    def _strays(self, table: Mapping[int, ProcessEntry]) -> dict[int, ProcessEntry]:
        """Return processes that escaped by a double fork with a cleared environment.

        They have fallen to this process, their subreaper. It is not known to which replica they
        belonged, so no replica ends, or is started again, before they are gone.
        """
        me = os.getpid()
        living = [replica for replica in self.replicas if not replica.done]
        roots = [
            pid
            for pid, entry in table.items()
            if entry.parent == me and not any(replica.owns(entry.identity) for replica in living)
        ]
        return {pid: table[pid] for pid in below(table, roots)}


def _open_wakers(run: RunDir, supervisor: Supervisor) -> list[int]:
    """Open what ends a rest early: a pipe for signals, and the run's FIFO if it still exists."""
    reader, writer = os.pipe()
    wakers = [reader]
    # Opened for reading and writing, so that it never reports an end when the last writer closes.
    with contextlib.suppress(OSError, InvalidRequestError):
        wakers.append(open_own(run.wake, os.O_RDWR, fifo=True))
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.terminate())
    # Handlers instead of SIG_IGN, which the replicas would inherit.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return wakers


class _Ready:
    """A channel that tells the launcher, once, how the start went.

    A launcher that is gone does not stop anything.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, error: str | None) -> None:
        if self._descriptor < 0:
            return
        answer = json.dumps({"error": error and error[:5000]})
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, answer.encode() + b"\n")
        os.close(self._descriptor)
        self._descriptor = -1


def _supervise(
    run: RunDir, record: RunRecord, orders: Sequence[Order], ready: _Ready, *, take_over: bool
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    supervisor = Supervisor(run, record, orders)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # the handlers are there now
    with noted():
        pids = {"supervisor": os.getpid(), "parent": os.getppid()}
        write_json(run.path / "supervisor.json", pids)
    if not take_over:
        try:
            supervisor.start_all()
        except (OSError, BackendError) as error:
            ready.tell(f"{type(error).__name__}: {error}")
            return
    else:
        supervisor.adopt_all()
        if orders and not run.started.exists():
            supervisor.abort()
            ready.tell(
                "the supervisor was killed while it started the replicas; those it had started "
                "were ended"
            )
            return
    ready.tell(None)
    supervisor.loop()


def _guard(
    run: RunDir, record: RunRecord, orders: Sequence[Order], ready: _Ready, *, recover: bool
) -> int:
    """Run the guardian: fork the supervisor, and become it if it dies before its work is done."""
    adopt_orphans()
    # Blocked during the fork, so that a signal meets a handler in either process.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        adopt_orphans()
        code = 70
        try:
            _supervise(run, record, orders, ready, take_over=recover)
            code = 0
        except BaseException:  # noqa: BLE001  # the guardian goes on, and the log says why
            say(traceback.format_exc())
        finally:
            os._exit(code)
    signal.signal(signal.SIGTERM, lambda *_: _forward(child))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _, status = os.waitpid(child, 0)
    if status == 0:
        return 0
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    say(f"{now} the supervisor ended with wait status {status}; its guardian goes on\n")
    _supervise(run, record, orders, ready, take_over=True)
    return 0


_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _forward(child: int) -> None:
    # The supervisor is our child and not yet reaped, so its pid cannot belong to another process.
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)


def _forget_signals() -> None:
    """Ignore and block no signal only because the launcher does.

    A guardian waits for its child, and replicas are told to end.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Python itself ignores these, and resets them for programs that it starts.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def main(lock: int, ready_descriptor: int) -> None:
    """Run the program of the supervisor; its orders come on stdin.

    Args:
        lock: The run's lock, held by the launcher on this shared descriptor, or to be taken in a
            recovery.
        ready_descriptor: The descriptor on which the launcher waits for one line of JSON.
    """
    _forget_signals()
    job = json.loads(sys.stdin.buffer.read())
    if os.fork():
        os._exit(0)  # so that the launcher has no child to wait for later
    for descriptor in (lock, ready_descriptor):
        os.set_inheritable(descriptor, False)
    run = RunDir(Path(job["run"]), job["uid"])
    ready = _Ready(ready_descriptor)
    code = 70
    try:
        record = read_record(run)
        if record is None or record.uid != run.uid:
            ready.tell(f"the run at {run.path} was removed from outside")
        elif not try_lock(lock, wait=1.0 if job["recover"] else 10.0):
            ready.tell(None)  # another process supervises already
        else:
            orders = [Order.from_dict(order) for order in job["orders"]]
            code = _guard(run, record, orders, ready, recover=job["recover"])
    except BaseException as error:  # noqa: BLE001  # no caller would report it
        say(traceback.format_exc())
        # Or a caller that tries again at once would take this process for a supervisor
        if job["recover"]:
            fcntl.flock(lock, fcntl.LOCK_UN)
        ready.tell(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)
