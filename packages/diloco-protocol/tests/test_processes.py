"""What belongs to a replica is found, whoever its parent is by now."""

import errno
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import _attempts, _processes
from diloco_protocol._processes import (
    Process,
    descendants,
    from_proc,
    from_ps,
    members,
    parse_stat,
    processes,
    read_process,
)

TREE = """
import subprocess, sys
code = "import sys; print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
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
@pytest.mark.processes
def test_the_table_has_parents_and_groups(table):
    with tree() as (parent, child):
        found = {process.pid: process for process in table()}
        assert found[parent][:3] == (parent, os.getpid(), parent)
        assert found[child][:3] == (child, parent, parent)
        assert os.getpid() in found


@given(st.lists(st.integers(0, 30), max_size=30), st.sets(st.integers(1, 31), max_size=4))
def test_descendants_are_a_closure(parents, roots):
    table = dict(enumerate(parents, start=1))
    below = descendants(table, roots)
    assert below >= roots & set(table)
    for pid, parent in table.items():
        assert (pid in below) == (pid in roots or (parent in below and parent in table))


@given(st.text(st.characters(exclude_characters="\x00\n"), max_size=15))
def test_the_name_of_a_program_does_not_confuse(name):
    rest = "S 11 22 33 " + " ".join(str(k) for k in range(7, 22)) + " 987654 0 0"
    assert parse_stat(5, f"5 ({name}) {rest}") == Process(5, 11, 22, "987654")


@pytest.mark.parametrize("text", ["", "5 (a) Z 1 1", "5 (a) S 1 2 3"])
def test_what_is_cut_off_or_a_zombie_is_no_process(text):
    assert parse_stat(5, text) is None
    assert parse_stat(5, "5 (a) Z " + "1 " * 30) is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
@pytest.mark.processes
def test_a_process_keeps_its_start_and_another_has_another():
    with tree() as (parent, child):
        alone = {process.pid: process for process in from_proc()}
        assert read_process(parent) == alone[parent]
        assert read_process(child).parent == parent
        assert alone[parent].start
        assert read_process(os.getpid()).start != alone[parent].start
    assert read_process(parent) is None


def test_a_listing_does_not_find_itself():
    own = {process.pid for process in from_ps() if process.parent == os.getpid()}
    assert own <= {process.pid for process in processes() if process.parent == os.getpid()}


@pytest.mark.processes
def test_members_are_found_by_descent_and_by_group():
    with tree() as (parent, child):
        assert {parent, child} <= {process.pid for process in members(os.getpid(), -1)}
        assert [process.pid for process in members(parent, -1)] == [child]
        assert {process.pid for process in members(child, parent)} == {parent}, (
            "whoever hangs above it"
        )


@pytest.mark.processes
def test_what_has_ended_does_not_count():
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
        assert child.pid not in {process.pid for process in processes()}
        assert child.pid not in {process.pid for process in from_ps()}


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EMFILE, errno.EIO]
)
def test_only_a_process_that_is_gone_or_hidden_is_none(monkeypatch, number):
    """One that cannot be looked at may live: a moment without file descriptors proves nothing."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_processes, "open", refuse, raising=False)
    if number in {errno.EMFILE, errno.EIO}:
        with pytest.raises(OSError, match=os.strerror(number)):
            read_process(os.getpid())
    else:
        assert read_process(os.getpid()) is None


def test_a_runner_that_cannot_see_what_is_left_looks_again(monkeypatch):
    looks = iter([OSError(errno.ENFILE, "too many"), [], PermissionError(errno.EPERM, "never")])

    def look(*_):
        seen = next(looks)
        if isinstance(seen, OSError):
            raise seen
        return seen

    monkeypatch.setattr(_attempts, "members", look)
    monkeypatch.setattr(_attempts, "_reap", lambda *_: 256)
    signals = SimpleNamespace(received=[], wait=lambda seconds: None)
    arguments = SimpleNamespace(pid=0), SimpleNamespace(timeout=None, grace=1.0), signals
    assert _attempts._watch(*arguments) == (256, None, None)
    with pytest.raises(PermissionError):
        _attempts._watch(*arguments)
