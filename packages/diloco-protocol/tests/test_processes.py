"""What belongs to a replica is found, whoever its parent is by now."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco_protocol._processes import Process, from_proc, from_ps, members, processes

TREE = """
import subprocess, sys
code = "import sys; print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def tree():
    """A process in a group of its own with one child; both end when their standard input does."""
    with subprocess.Popen(
        [sys.executable, "-c", TREE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        yield parent.pid, int(parent.stdout.readline())
        parent.stdin.close()


@pytest.mark.parametrize(
    "table",
    [
        from_ps,
        pytest.param(
            from_proc,
            marks=pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here"),
        ),
    ],
)
def test_the_table_has_parents_and_groups(table):
    with tree() as (parent, child):
        found = {process.pid: process for process in table()}
        assert found[parent] == Process(parent, os.getpid(), parent)
        assert found[child] == Process(child, parent, parent)
        assert os.getpid() in found


def test_a_listing_does_not_find_itself():
    own = {process.pid for process in from_ps() if process.parent == os.getpid()}
    assert own <= {process.pid for process in processes() if process.parent == os.getpid()}


def test_members_are_found_by_descent_and_by_group():
    with tree() as (parent, child):
        assert {parent, child} <= {process.pid for process in members(os.getpid(), -1)}
        assert [process.pid for process in members(parent, -1)] == [child]
        assert {process.pid for process in members(child, parent)} == {parent}, (
            "whoever hangs above it"
        )


def test_what_has_ended_does_not_count():
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
        assert child.pid not in {process.pid for process in processes()}
        assert child.pid not in {process.pid for process in from_ps()}
