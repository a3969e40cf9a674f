import errno
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from diloco_local._processes import ProcessId

pytestmark = pytest.mark.processes


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_of_itself():
    identity = ProcessId.of(os.getpid())
    assert identity.alive()
    assert ProcessId.from_dict(asdict(identity)) == identity


def test_another_start_time_is_another_process(sleeper):
    identity = ProcessId.of(sleeper.pid)
    for other in (
        replace(identity, start=identity.start + "1"),
        replace(identity, boot="another boot"),
        replace(identity, namespace="pid:[1]"),
    ):
        assert not other.alive()
        assert not other.send(signal.SIGKILL)
    assert sleeper.poll() is None
    assert identity.send(signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_zombie_is_gone():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    identity = ProcessId.of(process.pid)
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    try:
        assert not identity.alive()
        assert ProcessId.of(process.pid) is None
    finally:
        process.wait()
    assert not identity.send(signal.SIGTERM)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_a_machine_without_pidfds(sleeper, monkeypatch, number):
    def refuse(pid):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert ProcessId.of(sleeper.pid).send(signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_process_that_may_not_be_signalled_is_no_error(sleeper, monkeypatch):
    """Such as one below a replica that has become root: its supervisor died of it."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse, raising=False)
    monkeypatch.setattr(os, "kill", refuse)
    assert not ProcessId.of(sleeper.pid).send(signal.SIGKILL)
