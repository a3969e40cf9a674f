"""The watchdog with real processes: it, its guardian, runner and entrypoint die in every order."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_lab import locate, results_of, run_of

from diloco_local._processes import ProcessId, members
from diloco_local._supervisor import Supervisor
from diloco_protocol import InvalidRequestError, Reason, ReplicaHandle, ReplicaState, ReplicaStatus
from diloco_protocol.backend import status_to_data

pytestmark = pytest.mark.processes


class Watch:
    """The processes around a replica, found from its files."""

    def __init__(self, handle, until):
        self._run, self._record = locate(handle)
        self._rank = handle.rank
        self._until = until

    def _read(self, key):
        return ProcessId.of(self.pids()[key])

    def pids(self):
        return json.loads((self._run.path / "supervisor.json").read_text())

    @property
    def supervisor(self):
        return self._read("supervisor")

    @property
    def guardian(self):
        return self._read("parent")

    @property
    def runner(self):
        return ProcessId.from_dict(
            json.loads(self._run.replica(self._rank).state.read_text())["runner"]
        )

    @property
    def replica_folder(self):
        return self._run.replica(self._rank).path

    @property
    def alive(self):
        return list(members(self._record.marker(self._rank)))

    @property
    def log(self):
        return self._run.log.read_text()

    def kill(self, *victims):
        """Whether all of them were there to be killed; waits until they are gone."""
        hit = [victim.send(signal.SIGKILL) for victim in victims]
        self._until(lambda: not any(victim.alive() for victim in victims))
        return all(hit)


@pytest.fixture
def watch(until):
    return lambda handle: Watch(handle, until)


def end_of(run):
    results = results_of(run.executor, run.handles)
    return [result["status"] for result in results], run.executor.describe(run.handle)


def test_a_killed_supervisor_costs_the_replicas_nothing(waiting, watch, until):
    run = waiting(2)
    around = watch(run.handle)
    around.kill(around.supervisor)
    until(lambda: "its guardian goes on" in around.log)
    assert run.executor.poll(run.handle) is ReplicaState.RUNNING
    run.go()
    states, status = end_of(run)
    assert states == ["succeeded", "succeeded"]
    assert status.exit_code == 0


def still_runs(run):
    """Whether nobody has ended the replica so far."""
    return ProcessId.of(run.pid()) is not None


def test_the_guardian_enforces_the_timeout(overrunning, watch):
    def leave_it_to_the_guardian(run):
        around = watch(run.handle)
        return (
            around.kill(around.supervisor)
            and around.runner.send(signal.SIGSTOP)  # so that it is not the runner who does it
            and still_runs(run)
        )

    run = overrunning(leave_it_to_the_guardian)
    around = watch(run.handle)
    states, status = end_of(run)
    assert (states, status.reason) == (["failed"], Reason.TIMEOUT)
    assert around.alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's subreaper")
def test_the_guardian_reads_the_exit_of_a_runner(waiting, watch):
    run = waiting()
    around = watch(run.handle)
    around.kill(around.supervisor)
    around.runner.send(signal.SIGKILL)
    states, status = end_of(run)
    assert (states, status.signal, status.exit_code) == (["failed"], "SIGKILL", 137)
    assert around.alive == []


def test_the_guardian_starts_a_failed_attempt_again(waiting, watch, folder, until):
    run = waiting(max_restarts=1)
    around = watch(run.handle)
    around.kill(around.supervisor)
    os.kill(run.pid(), signal.SIGKILL)
    until((folder / "up-0-2").exists)
    run.go()
    states, status = end_of(run)
    assert (states, status.attempt) == (["succeeded"], 2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_a_disk_that_is_full_for_a_while_stops_no_supervisor(waiting, watch, folder, until):
    run = waiting(2, max_restarts=1)
    around = watch(run.handle)
    limit = resource.RLIMIT_FSIZE
    supervisor = around.supervisor.pid
    before = resource.prlimit(supervisor, limit, (0, resource.RLIM_INFINITY))
    os.kill(run.pid(0), signal.SIGKILL)
    until((around.replica_folder / "attempt-2").exists)
    time.sleep(1)
    assert run.executor.poll(run.handle) is ReplicaState.RUNNING
    assert list(around.replica_folder.rglob("*.tmp")) == []
    resource.prlimit(supervisor, limit, before)
    until(lambda: run.executor.poll(run.handle).terminal)
    assert run.executor.describe(run.handle).reason is Reason.START_FAILED
    os.kill(run.pid(1), signal.SIGKILL)
    until((folder / "up-1-2").exists)
    run.go()
    assert results_of(run.executor, run.handles)[1]["attempt"] == 2
    assert around.pids()["supervisor"] == supervisor


@pytest.mark.parametrize("state", ["as it was", "damaged"])
def test_without_both_an_end_that_a_stranger_wrote_is_none(waiting, watch, state):
    run = waiting()
    around = watch(run.handle)
    around.kill(around.guardian, around.supervisor)
    final = around.replica_folder / "final.json"
    if state == "damaged":
        (around.replica_folder / "state.json").write_text("{")
    final.write_text(json.dumps(status_to_data(ReplicaStatus(ReplicaState.SUCCEEDED))))
    assert run.executor.poll(run.handle) is ReplicaState.RUNNING
    with pytest.raises(InvalidRequestError, match="have not ended"):
        run.executor.purge(run.handle)
    run.executor.cancel(run.handle)
    states, status = end_of(run)
    assert (states, status.reason) == (["cancelled"], Reason.CANCEL_REQUESTED)
    assert around.alive == []


def test_without_both_the_replicas_go_on_and_report(waiting, watch):
    run = waiting(2)
    around = watch(run.handle)
    around.kill(around.guardian, around.supervisor)
    status = run.executor.describe(run.handle)
    assert (status.state, status.native) == (ReplicaState.RUNNING, "unsupervised")
    run.go()
    assert [r["result"] for r in results_of(run.executor, run.handles)] == [0, 1]


def test_without_both_the_runner_enforces_the_timeout(overrunning, watch):
    def leave_it_to_the_runner(run):
        around = watch(run.handle)
        return around.kill(around.guardian, around.supervisor) and still_runs(run)

    run = overrunning(leave_it_to_the_runner)
    around = watch(run.handle)
    states, status = end_of(run)
    assert (states, status.reason) == (["failed"], Reason.TIMEOUT)
    assert around.alive == []


def test_without_both_a_cancel_brings_a_new_supervisor(waiting, watch, until):
    run = waiting(2)
    around, other = watch(run.handle), watch(run.handles[1])
    around.kill(around.guardian, around.supervisor)
    run.executor.cancel(run.handle)
    until(lambda: run.executor.poll(run.handle).terminal)
    assert run.executor.describe(run.handle).reason is Reason.CANCEL_REQUESTED
    assert around.alive == []
    # The sibling is watched again, and unharmed.
    assert run.executor.describe(run.handles[1]).native == "running"
    other.runner.send(signal.SIGKILL)
    until(lambda: run.executor.poll(run.handles[1]).terminal)
    assert run.executor.poll(run.handles[1]) is ReplicaState.FAILED
    assert other.alive == []


def test_what_is_left_of_all_three_is_running_until_it_is_gone(waiting, watch, until):
    """Supervisor, guardian and runner killed: the entrypoint works, so "failed" is a lie."""
    run = waiting()
    around = watch(run.handle)
    around.kill(around.guardian, around.supervisor, around.runner)
    entrypoint = ProcessId.of(run.pid())
    assert entrypoint.alive()
    assert run.executor.poll(run.handle) is ReplicaState.RUNNING
    run.executor.cancel(run.handle)
    states, status = end_of(run)
    assert (states, status.reason) == (["cancelled"], Reason.CANCEL_REQUESTED)
    assert not entrypoint.alive()


@pytest.mark.sampled
@pytest.mark.parametrize("replace", [lambda wake: None, Path.touch, Path.mkdir])
def test_a_run_whose_fifo_is_gone_can_be_cancelled(waiting, watch, replace):
    run = waiting()
    around = watch(run.handle)
    around.kill(around.guardian, around.supervisor)
    run_of(run.handle).wake.unlink()
    replace(run_of(run.handle).wake)
    run.executor.cancel(run.handle)
    states, status = end_of(run)
    assert (states, status.reason) == (["cancelled"], Reason.CANCEL_REQUESTED)


def test_everything_killed_is_a_failure_that_says_what_is_not_known(waiting, watch):
    run = waiting()
    around = watch(run.handle)
    entrypoint = ProcessId.of(run.pid())
    around.kill(around.guardian, around.supervisor, around.runner, entrypoint)
    status = run.executor.describe(run.handle)
    assert (status.state, status.reason, status.exit_code) == (
        ReplicaState.FAILED,
        Reason.PLATFORM,
        None,
    )
    assert "not known" in status.message
    run.executor.cancel(run.handle)
    assert run.executor.describe(run.handle) == status


def test_a_kill_from_outside_is_no_cancel(waiting, watch):
    run = waiting()
    watch(run.handle).runner.send(signal.SIGKILL)
    states, status = end_of(run)
    assert (states, status.signal, status.reason) == (["failed"], "SIGKILL", Reason.ERROR)
    assert ProcessId.of(run.pid()) is None


def test_a_runner_told_to_end_was_stopped_from_outside(waiting, watch):
    run = waiting()
    watch(run.handle).runner.send(signal.SIGTERM)
    states, status = end_of(run)
    assert (states, status.reason, status.signal) == (
        ["cancelled"],
        Reason.STOPPED_EXTERNALLY,
        "SIGTERM",
    )


@pytest.mark.parametrize("who", ["guardian", "supervisor"])
def test_a_supervisor_told_to_end_ends_the_run(waiting, watch, who):
    run = waiting(2)
    around = watch(run.handle)
    getattr(around, who).send(signal.SIGTERM)
    states, status = end_of(run)
    assert (states, status.reason) == (["cancelled", "cancelled"], Reason.STOPPED_EXTERNALLY)
    assert around.alive == []


def test_a_cancel_is_finished_when_the_launcher_is_killed(make, tmp_path, folder, until):
    """The launcher dies of SIGKILL right after the cancel, with a replica that ignores SIGTERM."""
    make()
    program = """if True:
        import os, sys, time
        from diloco_local import LocalProcessExecutor
        executor = LocalProcessExecutor(root=sys.argv[1], pythonpath=[sys.argv[2]], grace=0.5)
        (handle,) = executor.launch_replicas(1, "trainer:stubborn", {"folder": sys.argv[3]})
        while not os.path.exists(sys.argv[3] + "/up-0-1"):
            time.sleep(0.01)
        executor.cancel(handle)
        print(handle.to_json(), flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state"), str(tmp_path), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    handle = ReplicaHandle.from_json(done.stdout)
    executor = make()
    until(lambda: executor.poll(handle).terminal)
    status = executor.describe(handle)
    assert (status.state, status.signal) == (ReplicaState.CANCELLED, "SIGKILL")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "habit",
    [
        "os.closerange(0, 2)",
        "os.closerange(0, 3)",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    ],
)
def test_what_a_launcher_has_closed_ignored_or_blocked_is_its_own(
    make, watch, until, tmp_path, folder, habit
):
    executor = make()
    program = f"""if True:
        import os, signal, sys
        {habit}
        from diloco_local import LocalProcessExecutor
        executor = LocalProcessExecutor(root=sys.argv[1], pythonpath=[sys.argv[2]], grace=0.5)
        (handle,) = executor.launch_replicas(
            1, "trainer:wait", {{"folder": sys.argv[3]}}, timeout=120
        )
        with open(sys.argv[2] + "/handle", "w") as file:
            file.write(handle.to_json())
    """
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state"), str(tmp_path), str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    handle = ReplicaHandle.from_json((tmp_path / "handle").read_text())
    assert executor.describe(handle).native == "running"
    until((folder / "up-0-1").exists)
    around = watch(handle)
    if sys.platform == "linux":
        status = Path(f"/proc/{around.runner.pid}/status").read_text()
        assert "\nSigBlk:\t0000000000000000\n" in status
    around.kill(around.supervisor)
    until(lambda: "its guardian goes on" in around.log)
    (folder / "go").touch()
    assert results_of(executor, [handle])[0]["status"] == "succeeded"


def test_a_run_that_cannot_be_called_started_is_ended():
    ended = []

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    supervisor = object.__new__(Supervisor)
    supervisor._run = SimpleNamespace(mark_started=full)
    supervisor.replicas = [SimpleNamespace(start=lambda: None)]
    supervisor.abort = lambda: ended.append(True)
    with pytest.raises(OSError, match="No space left"):
        supervisor.start_all()
    assert ended == [True]


def test_a_supervisor_that_cannot_look_looks_again(capfd):
    replica = SimpleNamespace(done=False, being_ended=False, sample=lambda: None)

    def step():
        replica.step = lambda: setattr(replica, "done", True)
        raise OSError(errno.EMFILE, "Too many open files")

    supervisor = object.__new__(Supervisor)
    supervisor._terminated = False
    supervisor._collect = lambda: None
    supervisor._rest = lambda seconds: None
    replica.step = step
    supervisor.replicas = [replica]
    supervisor.loop()
    assert "Too many open files" in capfd.readouterr().err


def test_stopping_is_said_until_all_is_gone(make, waiting, until):
    run = waiting(function="deaf", executor=make(grace=600.0))
    run.executor.cancel(run.handle)
    until((run.signs / "told-0").exists, "the word to end")
    status = run.executor.describe(run.handle)
    assert (status.state, status.stopping) == (ReplicaState.RUNNING, True)
    os.kill(run.pid(), signal.SIGKILL)  # nobody waits for the grace to pass

    def ended():
        status = run.executor.describe(run.handle)
        if not status.state.terminal:
            assert (status.state, status.stopping) == (ReplicaState.RUNNING, True)
            return None
        assert ProcessId.of(run.pid()) is None, "it was called ended while it was alive"
        return status

    assert until(ended, "the end").state is ReplicaState.CANCELLED


def test_the_supervisor_is_small(waiting, watch):
    run = waiting()
    if sys.platform != "linux":
        pytest.skip("memory is read in /proc, which only Linux has")
    around = watch(run.handle)
    for process in (around.supervisor, around.guardian):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        assert kilobytes < 40_000
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps


def test_the_timeout_is_enforced_and_nothing_is_left(overrunning):
    """It is not merely stored."""
    run = overrunning()
    (result,) = results_of(run.executor, run.handles)
    status = run.executor.describe(run.handle)
    assert (result["status"], status.reason) == ("failed", Reason.TIMEOUT)
    assert ProcessId.of(run.pid()) is None


@pytest.mark.skipif(
    sys.platform != "linux", reason="orphans without a marker are found by the kernel's subreaper"
)
def test_the_whole_tree_ends_with_sessions_and_orphans(waiting, folder, nothing_survives):
    """Grandchildren end too: those in sessions of their own, and orphans."""
    run = waiting(function="family")
    family = [
        ProcessId.of(int((folder / f"pid-{name}").read_text()))
        for name in ("group", "session", "orphan")
    ]
    assert all(member.alive() for member in family)
    run.executor.cancel(run.handle)
    assert results_of(run.executor, run.handles)[0]["status"] == "cancelled"
    # Cancelled is said only when all of it is gone, so no waiting here.
    assert not any(member.alive() for member in family)


def orphan_of(folder):
    return ProcessId.of(int((folder / "pid-orphan").read_text()))


@pytest.mark.skipif(
    sys.platform != "linux", reason="orphans without a marker are found by the kernel's subreaper"
)
@pytest.mark.parametrize("when", ["at once", "told"])
def test_an_orphan_ends_before_its_replica_does_though_another_lives(make, folder, until, when):
    executor = make()
    arguments = {"folder": str(folder), "when": when}
    handles = executor.launch_replicas(2, "trainer:slips_away", arguments)
    until((folder / "up-1-1").exists)
    if when == "told":
        until((folder / "up-0-1").exists)
        executor.cancel(handles[0])
    (result,) = results_of(executor, handles[:1])
    assert orphan_of(folder) is None
    assert result["status"] == ("cancelled" if when == "told" else "failed")
    (folder / "go").touch()
    assert results_of(executor, handles[1:])[0]["status"] == "succeeded"


@pytest.mark.skipif(
    sys.platform != "linux", reason="orphans without a marker are found by the kernel's subreaper"
)
def test_no_attempt_begins_while_an_orphan_of_the_last_one_works(make, folder, until):
    executor = make()
    arguments = {"folder": str(folder), "when": "at once"}
    handles = executor.launch_replicas(2, "trainer:slips_away", arguments, max_restarts=1)
    until((folder / "up-0-2").exists)
    assert orphan_of(folder) is None
    (folder / "go").touch()
    assert [result["attempt"] for result in results_of(executor, handles)] == [2, 1]


def test_a_stubborn_replica_is_killed_when_the_grace_is_over(waiting):
    run = waiting(function="stubborn")
    began = time.monotonic()
    run.executor.cancel(run.handle)
    states, status = end_of(run)
    assert (states, status.signal) == (["cancelled"], "SIGKILL")
    assert time.monotonic() - began >= 1.0  # which is the grace


def test_stubborn_replicas_share_one_grace(make, waiting, until):
    """n replicas that ignore SIGTERM end within one grace: all are told before any is over."""
    run = waiting(4, "deaf", executor=make(grace=600.0))
    for handle in run.handles:
        run.executor.cancel(handle)
    until(lambda: len(list(run.signs.glob("told-*"))) == 4, "the word to end to all of them")
    assert {str(run.executor.poll(handle)) for handle in run.handles} == {"running"}
    for rank in range(4):
        os.kill(run.pid(rank), signal.SIGKILL)
    assert [result["status"] for result in results_of(run.executor, run.handles)] == [
        "cancelled"
    ] * 4
