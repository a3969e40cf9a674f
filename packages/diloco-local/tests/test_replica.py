"""One replica's state machine with real, tiny programs in place of the runner."""

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from diloco_local import _replica
from diloco_local._oom import OomWatch
from diloco_local._orders import Order
from diloco_local._processes import ProcessId
from diloco_local._replica import Phase, Replica
from diloco_local._rundir import ReplicaDir
from diloco_local._supervisor import Supervisor
from diloco_protocol import Reason, ReplicaSpec, ReplicaState
from diloco_protocol.backend import status_from_data

pytestmark = pytest.mark.processes

# Workers of pytest run at the same time, and the end of a replica ends all that has its marker.
OF_TEST = f"test-{os.getpid()}/0"


def rules(grace, timeout=None, max_restarts=0):
    """What a replica asks the record of its run for."""
    return SimpleNamespace(grace=grace, timeout=timeout, max_restarts=max_restarts)


SPEC = ReplicaSpec("trainer:train", {"x": [1]}, rank=0, world_size=1, timeout=5)


@pytest.fixture
def machine(tmp_path, nothing_survives, until):
    """Runs a shell command as a replica to its end; returns its terminal status."""

    def run(command, *, cancel=False, restarts=0, kills=lambda: None, during=None):
        directory = ReplicaDir(tmp_path / "replica-0")
        directory.path.mkdir()
        if cancel:
            directory.cancel.write_text("{}")
        order = Order(SPEC, ("/bin/sh", "-c", command), dict(os.environ), str(tmp_path))

        def reap(pid):
            found, status = os.waitpid(pid, os.WNOHANG)
            return status if found else None

        replica = Replica(
            directory,
            OF_TEST,
            rules(0.3, max_restarts=restarts),
            order,
            reap,
            OomWatch(kills),
            lambda table: {},
        )
        replica.start()
        if during is not None:
            during()

        def look():
            replica.step()
            return replica.done

        until(look)
        status = status_from_data(json.loads(directory.final.read_text()))
        assert json.loads(directory.state.read_text())["attempt"] == status.attempt
        return status

    return run


def test_a_kill_with_evidence_is_oom(machine):
    counter = [4]
    status = machine(
        "kill -9 $$", kills=lambda: counter[0], during=lambda: counter.__setitem__(0, 5)
    )
    assert (status.state, status.reason, status.signal) == (
        ReplicaState.FAILED,
        Reason.OOM,
        "SIGKILL",
    )


def test_a_kill_without_evidence_is_not(machine):
    status = machine("kill -9 $$", kills=lambda: 4)
    assert (status.state, status.reason, status.signal) == (
        ReplicaState.FAILED,
        Reason.ERROR,
        "SIGKILL",
    )


def test_another_end_is_not_oom_even_with_evidence(machine):
    counter = [4]
    status = machine("exit 3", kills=lambda: counter[0], during=lambda: counter.__setitem__(0, 5))
    assert (status.reason, status.exit_code, status.signal) == (Reason.ERROR, 3, None)


def test_a_failure_while_a_cancel_waits_is_not_tried_again(machine):
    status = machine("exit 3", cancel=True, restarts=5)
    assert (status.state, status.reason, status.attempt) == (
        ReplicaState.CANCELLED,
        Reason.CANCEL_REQUESTED,
        1,
    )


def test_an_outcome_that_cannot_be_read_is_a_failure_that_says_so(machine, tmp_path):
    status = machine(f"echo '{{\"version\": 99}}' > {tmp_path}/replica-0/attempt-1/outcome.json")
    assert (status.state, status.reason) == (ReplicaState.FAILED, Reason.PLATFORM)
    assert "cannot be read" in status.message
    assert "99" in status.message


def test_every_attempt_counts(machine):
    assert machine("exit 3", restarts=2).attempt == 3


def test_every_attempt_is_told_its_number_and_all_else_as_ordered(machine, tmp_path):
    machine("exit 3", restarts=2)
    told = [
        ReplicaSpec.from_json((tmp_path / f"replica-0/attempt-{k}/spec.json").read_text())
        for k in (1, 2, 3)
    ]
    assert told == [replace(SPEC, attempt=k) for k in (1, 2, 3)]


def test_what_the_runner_left_behind_is_ended_first(machine, tmp_path, until):
    """The runner dies; its stubborn child lives until SIGKILL, and then the replica has ended."""
    child = tmp_path / "child"
    stubborn = (
        f"import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    status = machine(
        f'{sys.executable} -S -c "{stubborn}" & while [ ! -s {child} ]; do sleep 0.01; done; exit 3'
    )
    assert (status.state, status.exit_code) == (ReplicaState.FAILED, 3)
    assert ProcessId.of(int(child.read_text())) is None


def test_what_was_never_started_says_so(tmp_path):
    replica = Replica(
        ReplicaDir(tmp_path),
        OF_TEST,
        rules(1),
        None,
        lambda pid: None,
        OomWatch(lambda: None),
        lambda table: {},
    )
    replica.give_up()
    assert replica.phase is Phase.DONE
    status = status_from_data(json.loads((tmp_path / "final.json").read_text()))
    assert status.reason is Reason.START_FAILED


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE])
def test_an_end_that_finds_no_room_is_written_down_later(tmp_path, monkeypatch, number):
    replica = Replica(
        ReplicaDir(tmp_path / "r"), OF_TEST, rules(1), None, lambda pid: None,
        OomWatch(lambda: None), lambda table: {},
    )  # fmt: skip
    (tmp_path / "r").mkdir()

    def lacking(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(_replica, "write_json", lacking)
        replica.give_up()
    assert not replica.done
    replica.step()
    assert replica.done
    assert [path.name for path in tmp_path.rglob("*")] == ["r", "final.json"]


def test_a_program_that_cannot_be_known_is_ended_at_once(tmp_path, monkeypatch, nothing_survives):
    """A supervisor without file descriptors could not tell it from a later process with its pid."""

    def lacking(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ProcessId, "of", lacking)
    order = Order(SPEC, ("/bin/sh", "-c", "exec sleep 60"), dict(os.environ), str(tmp_path))
    replica = Replica(
        ReplicaDir(tmp_path),
        OF_TEST,
        rules(1),
        order,
        lambda pid: None,
        OomWatch(lambda: None),
        lambda table: {},
    )
    with pytest.raises(OSError, match="Too many"):
        replica.start()
    assert replica._popen.wait() == -signal.SIGKILL
    assert replica.phase is Phase.RUNNING  # so that it is looked after until all of it is gone


@pytest.mark.parametrize("passed", [False, True])
def test_a_clock_that_is_set_forward_ends_nothing_that_is_adopted(
    tmp_path, monkeypatch, nothing_survives, passed
):
    """A supervisor that goes on for one that was killed counts on from where that one was."""
    order = Order(SPEC, ("/bin/sh", "-c", "exec sleep 60"), dict(os.environ), str(tmp_path))

    def replica(order):
        return Replica(
            ReplicaDir(tmp_path), OF_TEST, rules(1, 600.0), order, lambda pid: None,
            OomWatch(lambda: None), lambda table: {},
        )  # fmt: skip

    first = replica(order)
    first.start()
    try:
        now, ticks = _replica.time.time, _replica.time.monotonic
        monkeypatch.setattr(_replica.time, "time", lambda: now() + 86_400)
        second = replica(None)
        second.adopt()
        monkeypatch.setattr(_replica.time, "monotonic", lambda: ticks() + 700.0 * passed)
        second.step()
        assert second.being_ended is passed
    finally:
        first._popen.kill()
        first._popen.wait()


def test_a_process_that_becomes_another_one_while_it_is_looked_for_is_not_gone(tmp_path):
    """Nobody finds it, and only those that it was before are seen to have ended."""
    order = Order(SPEC, ("/bin/true",), dict(os.environ), str(tmp_path))
    ended = iter([0, 5, 5, 9, 9, 9])

    def reap(pid):
        return os.waitpid(pid, 0)[1]

    replica = Replica(
        ReplicaDir(tmp_path), OF_TEST, rules(1), order, reap, OomWatch(lambda: None),
        lambda table: {}, lambda: next(ended),
    )  # fmt: skip
    replica.start()
    os.waitid(os.P_PID, replica._pid, os.WEXITED | os.WNOWAIT)
    replica.step()
    replica.step()
    assert not replica.done
    replica.step()
    assert replica.done


def test_a_supervisor_counts_the_strays_that_have_ended(monkeypatch):
    """What ended and is no replica's runner has fallen to it."""
    supervisor = Supervisor.__new__(Supervisor)
    supervisor.replicas = [SimpleNamespace(is_runner=lambda pid: pid == 7)]
    supervisor._statuses, supervisor._ended_strays = {}, 0
    ended = iter([(7, 0), (8, 0), (9, 0), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(ended))
    assert supervisor._count_ended_strays() == 2
    assert supervisor._statuses == {7: 0}
