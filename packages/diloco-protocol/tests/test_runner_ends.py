"""How the runner ends replicas, and what it leaves behind: nothing."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from runner_lab import PATIENCE, alive, children, end, overrun, read_pid, replica, wait_for

from diloco_protocol import Reason, ReplicaSpec
from diloco_protocol._attempts import _outcome
from diloco_protocol._processes import processes

__all__ = ["replica"]

pytestmark = pytest.mark.processes


class TestEnds:
    def test_a_timeout(self, replica, tmp_path):
        outcome = end(
            replica("sleeps", timeout=0.5, grace=PATIENCE, mark=str(tmp_path / "pid")), tmp_path
        )
        assert outcome.reason is Reason.TIMEOUT
        assert outcome.signal == "SIGTERM"
        assert "longer than its timeout of 0.5 s" in outcome.error

    def test_a_stubborn_replica_is_killed_after_the_grace(self, replica, tmp_path):
        outcome = overrun(replica, tmp_path, "sleeps", stubborn=True)
        assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, "SIGKILL")

    def test_an_orderly_end_after_the_timeout_is_no_success(self, replica, tmp_path):
        outcome = overrun(replica, tmp_path, "leaves_politely", grace=PATIENCE)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (124, None, Reason.TIMEOUT)
        assert "longer than its timeout" in outcome.error

    def test_a_report_that_cannot_be_written_is_no_success(self, replica, tmp_path):
        outcome = end(replica("returns_when_the_disk_is_full"), tmp_path)
        assert (outcome.exit_code, outcome.result, outcome.reason) == (1, None, Reason.ERROR)

    def test_the_longest_timeout(self, replica, tmp_path):
        assert end(replica("returns", timeout=1e300), tmp_path).exit_code == 0

    def test_a_failure_of_its_own_stays_one_while_its_children_are_ended(self, replica, tmp_path):
        runner = replica("fails_and_leaves_a_child", grace=1.0, mark=str(tmp_path / "pid"))
        pid = read_pid(tmp_path / "pid")
        # Its child ignores SIGTERM, so from here the runner waits for the grace to pass.
        wait_for(lambda: "ValueError: by itself" in runner.stderr.readline(), "its traceback")
        wait_for(lambda: not children(runner.pid, besides=pid), "the replica itself to end")
        runner.terminate()
        outcome = end(runner, tmp_path)
        assert (outcome.reason, outcome.error) == (Reason.ERROR, "ValueError: by itself")
        assert not alive(pid)

    def test_a_word_to_the_program_is_passed_on_and_ends_nothing(self, replica, tmp_path):
        runner = replica("waits_for_a_word", mark=str(tmp_path / "pid"))
        read_pid(tmp_path / "pid")
        runner.send_signal(signal.SIGUSR1)
        assert end(runner, tmp_path).result == ["SIGUSR1", True]

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    )
    def test_a_signal_to_the_runner_reaches_the_replica(self, replica, tmp_path, number):
        runner = replica("sleeps", mark=str(tmp_path / "pid"))
        pid = read_pid(tmp_path / "pid")
        runner.send_signal(number)
        outcome = end(runner, tmp_path)
        assert outcome.reason is Reason.CANCEL_REQUESTED
        assert outcome.exit_code != 0
        assert not alive(pid)

    def test_a_stubborn_replica_is_killed_after_a_signal_too(self, replica, tmp_path):
        runner = replica("sleeps", mark=str(tmp_path / "pid"), stubborn=True)
        pid = read_pid(tmp_path / "pid")
        runner.terminate()
        assert end(runner, tmp_path).signal == "SIGKILL"
        assert not alive(pid)

    def test_a_success_that_wins_the_race_stays_one(self, replica, tmp_path):
        runner = replica("sleeps", mark=str(tmp_path / "pid"), finish=True, grace=PATIENCE)
        read_pid(tmp_path / "pid")
        runner.terminate()
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.reason) == (0, Reason.COMPLETED)
        assert outcome.result == "finished all the same"

    @pytest.mark.sampled
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
    def test_an_exit_with_0_on_a_signal_is_an_interruption(self, replica, tmp_path, number, how):
        mark = str(tmp_path / "pid")
        runner = replica("leaves_politely", grace=PATIENCE, mark=mark, how=how)
        read_pid(tmp_path / "pid")
        runner.send_signal(number)
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.signal) == (128 + number, number.name)
        assert outcome.reason is Reason.CANCEL_REQUESTED
        assert "exited with code 0 before its entrypoint had returned" in outcome.error

    def test_a_kill_from_outside_is_told(self, replica, tmp_path):
        runner = replica("sleeps", mark=str(tmp_path / "pid"))
        os.kill(read_pid(tmp_path / "pid"), signal.SIGKILL)
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (137, "SIGKILL", Reason.ERROR)

    @pytest.mark.sampled
    @pytest.mark.parametrize("wait", [True, False], ids=["cancelled", "finished"])
    @pytest.mark.parametrize("own_session", [True, False], ids=["own session", "same group"])
    def test_grandchildren_are_ended(self, replica, tmp_path, own_session, wait):
        runner = replica(
            "has_children", mark=str(tmp_path / "pid"), own_session=own_session, wait=wait
        )
        pid = read_pid(tmp_path / "pid")
        if wait:
            runner.terminate()
        outcome = end(runner, tmp_path)
        assert (outcome.result == "done") == (not wait)
        # It is killed; whoever has inherited it takes its exit code in its own time.
        wait_for(lambda: not alive(pid), "the end of the grandchild")


# With a /proc of its own, as a container has; nothing inside outlives unshare itself.
NAMESPACE = ("--pid", "--fork", "--mount-proc", "--kill-child")


def namespaces():
    """Whether a test may make a PID namespace, as a container is."""
    if not (unshare := shutil.which("unshare")):
        return False
    return (
        subprocess.run([unshare, *NAMESPACE, "true"], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.skipif(not namespaces(), reason="no PID namespaces may be made here")
class TestAsPid1:
    def test_it_heeds_sigterm_and_reaps_orphans(self, replica, tmp_path):
        mark = tmp_path / "pid"
        unshare = replica(
            "orphans_a_process", mark=str(mark), wrapper=["unshare", *NAMESPACE], grace=PATIENCE
        )
        wait_for(mark.exists, "the replica")
        assert mark.read_text() == "the parent is 1"
        (runner,) = [process for process in processes() if process.parent == unshare.pid]
        # The orphan may still live; once it has ended, it stays among them until the runner reaps
        # it.
        children_of_runner = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
        wait_for(
            lambda: len(children_of_runner.read_text().split()) == 1, "the orphan to be reaped"
        )
        os.kill(runner.pid, signal.SIGTERM)
        outcome = end(unshare, tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (
            143,
            "SIGTERM",
            Reason.CANCEL_REQUESTED,
        )


def test_a_clock_that_is_set_back_ends_no_attempt_before_its_start():
    start = 1e11  # far behind every clock of today
    assert _outcome(0, None, None, None, ReplicaSpec("m:f", {}, 0, 1), start).finished_at == start
    failed = _outcome(256, None, None, None, ReplicaSpec("m:f", {}, 0, 1), start)
    assert (failed.exit_code, failed.finished_at) == (1, start)
