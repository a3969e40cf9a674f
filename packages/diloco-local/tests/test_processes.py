import errno
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from diloco_local._processes import (
    MARKER,
    ProcessId,
    marker_of,
    members,
    process_table,
)

pytestmark = pytest.mark.processes


def test_this_process_is_in_the_table():
    entry = process_table()[os.getpid()]
    assert entry.identity == ProcessId.of(os.getpid())
    assert entry.parent == os.getppid()


@pytest.fixture
def tree(tmp_path):
    """A process with a child in a session of its own that has cleared its environment."""
    marker = f"{uuid.uuid4().hex}/0"
    program = (
        "import subprocess, time; subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600']); "
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, MARKER: marker})
    yield marker, process
    for entry in members(marker, [ProcessId.of(process.pid)]).values():
        entry.identity.send(9)
    process.wait()


def test_a_child_without_the_marker_is_found_below_one_with_it(tree, until):
    marker, process = tree
    until(lambda: marker_of(process.pid) == marker)
    until(lambda: len(members(marker)) == 2)
    assert process.pid in members(marker)
    assert members("another/0") == {}


def test_what_was_known_is_found_without_marker(tree, until):
    marker, process = tree
    until(lambda: len(members(marker)) == 2)
    child = next(entry.identity for pid, entry in members(marker).items() if pid != process.pid)
    assert set(members("another/0", [child])) == {child.pid}
    reused = ProcessId(child.pid, "0", child.boot, child.namespace)
    assert members("another/0", [reused]) == {}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here")
@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM, errno.EMFILE]
)
def test_whose_a_process_is_cannot_be_known_without_descriptors(monkeypatch, number):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    if number == errno.EMFILE:
        with pytest.raises(OSError, match=os.strerror(number)):
            marker_of(os.getpid())
    else:
        assert marker_of(os.getpid()) is None
