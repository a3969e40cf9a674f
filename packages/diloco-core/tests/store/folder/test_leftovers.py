"""What killed processes leave in a folder goes, what living ones use stays, and no more is kept
than will be used.
"""

import gc
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from training_lab import PATIENCE

from diloco_core._store._open import open_store

pytestmark = pytest.mark.processes

LARGE = 2**16

_KEEP_AND_WRITE = """
import sys, time
from diloco_core._store._open import open_store
store = open_store(sys.argv[1])
for number in range(3):
    store.put(f"deltas/{number}", [bytes(2**17)])
store.delete([f"deltas/{number}" for number in range(3)], unread=True)
def parts():
    yield b"begun"
    print("writing", flush=True)
    time.sleep(600)
store.put("state/1", parts())
"""


@pytest.fixture
def worker(tmp_path):
    """A process that keeps three files, and is in the middle of an object."""
    process = subprocess.Popen(
        [sys.executable, "-c", _KEEP_AND_WRITE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def temporary(folder):
    return sorted(path for path in folder.rglob(".tmp-*") if path.is_file())


def left_open(folder):
    """A store that has kept a file, and the file."""
    store = open_store(str(folder))
    store.put("deltas/0", [bytes(LARGE)])
    store.delete(["deltas/0"], unread=True)
    (path,) = temporary(folder)
    return store, path


def renamed(path, **changes):
    """The file under the name that it would have, had it another owner."""
    names = ("pid", "incarnation", "number", "place")
    parts = dict(zip(names, path.name.removeprefix(".tmp-").split("-"), strict=True)) | changes
    return path.rename(path.with_name(".tmp-" + "-".join(parts.values())))


@pytest.fixture
def spare(tmp_path):
    """A file that a store of this process has kept."""
    store, path = left_open(tmp_path)
    yield path
    store.close()


@pytest.mark.sampled
@pytest.mark.parametrize("act", ["open", "collect"])
def test_only_what_the_killed_leave_goes(tmp_path, worker, act):
    store = open_store(str(tmp_path))

    def clean():
        open_store(str(tmp_path)) if act == "open" else store.delete(["deltas/none"], unread=True)

    there = temporary(tmp_path)
    assert len(there) == 4
    clean()
    assert temporary(tmp_path) == there
    worker.kill()
    worker.wait()
    clean()
    assert temporary(tmp_path) == []


def test_the_files_of_the_one_before_with_the_same_id_go(tmp_path, spare):
    """In a container, a process that is started again often has the id of the killed one."""
    theirs = renamed(spare, incarnation="00000000")
    spare.write_bytes(b"")
    open_store(str(tmp_path))
    assert spare.exists()
    assert not theirs.exists()


def test_the_files_of_a_store_that_was_dropped_unclosed_go(tmp_path):
    store, _ = left_open(tmp_path)
    open_store(str(tmp_path))
    assert len(temporary(tmp_path)) == 1
    del store
    gc.collect()
    open_store(str(tmp_path))
    assert temporary(tmp_path) == []


def test_an_id_that_was_given_to_another_process_keeps_the_file(tmp_path, spare):
    theirs = renamed(spare, pid=str(os.getppid()), incarnation="00000000")
    os.utime(theirs, (0, 0))  # however old it is
    open_store(str(tmp_path))
    assert theirs.exists()


def test_what_cannot_be_removed_stays_and_holds_nothing_up(tmp_path, spare):
    dead = renamed(spare, pid=str(2**22 + 1))
    folders = [tmp_path / dead.name.replace(str(2**22 + 1), str(2**22 + 2 + n)) for n in range(20)]
    for folder in folders:
        folder.mkdir()
    open_store(str(tmp_path))
    assert not dead.exists()
    assert all(folder.exists() for folder in folders)


def test_files_of_other_machines_go_when_they_are_old(tmp_path, spare):
    # Process 2**22 + 1 cannot be here; there it may.
    theirs = renamed(spare, pid=str(2**22 + 1), incarnation="00000000", place="0123456789ab")
    for hours, stays in ((0.5, True), (1.5, False)):
        then = tmp_path.stat().st_mtime - 3600 * hours
        os.utime(theirs, (then, then))
        open_store(str(tmp_path))
        assert theirs.exists() == stays


def test_what_is_not_ours_stays_however_old_it_is(tmp_path, spare):
    """Files with names of another kind; links, pipes and folders with names of ours."""
    dead = spare.name.replace(str(os.getpid()), str(2**22 + 1))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(b"somebody's")
    names = (".tmp-notes", ".tmp-7-another-version", f"{dead}.bak", f"x{dead}")
    theirs = [tmp_path / name for name in names]
    for path in theirs:
        path.write_bytes(b"somebody's")
        os.utime(path, (0, 0))
    link, pipe, folder = (tmp_path / f"{dead[:-12]}{number:012x}" for number in range(3))
    link.symlink_to(outside)
    os.mkfifo(pipe)
    folder.mkdir()
    os.utime(outside, (0, 0))
    store = open_store(str(tmp_path))
    store.delete(["deltas/none"], unread=True)
    assert all(path.read_bytes() == b"somebody's" for path in (*theirs, outside))
    assert (link.is_symlink(), pipe.is_fifo(), folder.is_dir()) == (True, True, True)


_OWN_IDS = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*_OWN_IDS, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to make a namespace of process ids, as containers have",
)
def test_a_container_takes_no_process_outside_for_gone(tmp_path, worker):
    """It has the host's name here; but ids that are taken outside are free in it."""
    there = temporary(tmp_path)
    code = "import sys; from diloco_core._store._open import open_store; open_store(sys.argv[1])"
    subprocess.run(
        [*_OWN_IDS, sys.executable, "-c", code, str(tmp_path)], check=True, timeout=PATIENCE
    )
    assert temporary(tmp_path) == there


def test_many_clean_up_at_once_while_others_write(tmp_path, spare):
    for number in range(300):
        (tmp_path / spare.name.replace(str(os.getpid()), str(2**22 + 1 + number))).touch()
    writer, start = open_store(str(tmp_path)), threading.Barrier(5)

    def clean():
        start.wait()
        for _ in range(10):
            open_store(str(tmp_path))

    with ThreadPoolExecutor(4) as pool:
        cleaning = [pool.submit(clean) for _ in range(4)]
        start.wait()
        for number in range(50):
            writer.put(f"deltas/{number}", [bytes([number]) * LARGE])
            assert writer.get(f"deltas/{number}") == bytes([number]) * LARGE
            writer.delete([f"deltas/{number}"], unread=True)
        for each in cleaning:
            each.result()
    writer.close()
    assert temporary(tmp_path) == [spare]


def test_no_more_is_kept_than_is_written_between_two_deletions(tmp_path):
    def kept():
        return sum(path.stat().st_size for path in temporary(tmp_path))

    others, store = open_store(str(tmp_path)), open_store(str(tmp_path))
    for sync in range(4):
        for rank in range(5):
            others.put(f"deltas/{sync}/{rank}", [bytes(4 * LARGE)])
        for shard in range(2):
            store.put(f"deltas/{sync}/own-{shard}", [bytes(4 * LARGE)])
        store.delete(store.list("deltas/"), unread=True)
        assert kept() == 8 * LARGE, "what the next sync writes over"
    for sync in range(4, 8):
        store.put(f"deltas/{sync}/own", [bytes(LARGE)])
        others.put(f"deltas/{sync}/0", [bytes(LARGE)])
        store.delete(store.list("deltas/"), unread=True)
    assert kept() <= 8 * LARGE
    store.close()
    for sync in range(8, 14):  # fragments of two sizes in turn: while one is written, one goes
        before = store.list("deltas/")
        store.put(f"deltas/{sync}/own", [bytes(LARGE if sync % 2 else 4 * LARGE)])
        store.delete(before, unread=True)
    assert kept() == 4 * LARGE, "the next sync's"
    store.close()
    for rank in range(30):
        store.put(f"state/{rank}", [bytes(LARGE)])
    store.delete(store.list("state/"), unread=True)
    assert len(temporary(tmp_path)) == 8


@pytest.mark.slow
def test_a_child_process_does_not_write_over_its_parents_files(tmp_path, spare):
    """Both would take the same one."""
    code = """
import os, sys
from diloco_core._store._open import open_store
store = open_store(sys.argv[1])
store.put("deltas/1", [bytes(2**16)])
store.delete(["deltas/1"], unread=True)
if os.fork() == 0:
    store.put("deltas/child", [b"c" * 2**16])
    os._exit(0)
os.wait()
kept = [name for name in os.listdir(sys.argv[1]) if name.startswith(f".tmp-{os.getpid()}-")]
assert len(kept) == 1, kept
store.put("deltas/parent", [b"p" * 2**16])
assert store.get("deltas/child") == b"c" * 2**16
assert store.get("deltas/parent") == b"p" * 2**16
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
