"""A replica that replaces its files: it reports what it likes of itself, and stops no other."""

import sys

import pytest
from local_lab import results_of, run_of, wait_until

from diloco_protocol import ReplicaState
from diloco_protocol.backend import RESULT_BYTES

pytestmark = pytest.mark.processes

HOSTILE = '''
import os
import shutil
import time
from pathlib import Path


def do(names):
    """Every rank does another of these."""
    name = names[int(os.environ["REPLICA_RANK"])]
    files = Path(os.readlink("/proc/self/fd/1")).parent
    return globals()[name](files, files.parent)


def nothing(files, replica):
    return 1


def state_is_a_folder(files, replica):
    (replica / "state.json").unlink()
    (replica / "state.json").mkdir()


def times_is_a_link(files, replica):
    (files / "times.jsonl").symlink_to(files / "elsewhere")
    print("a line", flush=True)


def end_is_damaged(files, replica):
    (replica / "final.json").write_text("{")


def log_is_a_folder(files, replica):
    (files / "stdout.log").unlink()
    (files / "stdout.log").mkdir()


def all_is_gone(files, replica):
    shutil.rmtree(replica)


def folder_is_open(files, replica):
    replica.chmod(0o777)


def folder_is_a_link(files, replica):
    replica.symlink_to(replica.rename(f"{replica}-elsewhere"))


def folder_is_a_file(files, replica):
    shutil.rmtree(replica)
    replica.touch()


def attempt_is_a_file(files, replica):
    print("a line", flush=True)
    (replica / "attempt-7").touch()


def _report():
    return Path(Path("/proc/self/cmdline").read_text().split("\\0")[-2])


def report_is_a_fifo(files, replica):
    os.mkfifo(_report())
    os._exit(0)


def report_is_large(files, replica):
    with _report().open("wb") as file:
        file.truncate(1 << 30)
    os._exit(0)


def outcome_is_large(files, replica):
    with (files / "outcome.json").open("wb") as file:
        file.truncate(1 << 30)
    os.kill(os.getppid(), 9)
    time.sleep(600)


def result_is_large(files, replica):
    return "x" * (16 * 1024 * 1024 - 1)


def error_is_no_text(files, replica):
    raise ValueError("half a pair: \\ud800")
'''

ENDS = {
    "state_is_a_folder": ("succeeded", ""),
    "times_is_a_link": ("succeeded", ""),
    "end_is_damaged": ("succeeded", ""),
    "log_is_a_folder": ("succeeded", ""),
    "all_is_gone": ("failed", "not known"),
    "folder_is_open": ("failed", "no other can write to"),
    "folder_is_a_link": ("failed", "is a link"),
    "folder_is_a_file": ("failed", "not a folder"),
    "attempt_is_a_file": ("succeeded", ""),
    "report_is_a_fifo": ("failed", "cannot be read"),
    "report_is_large": ("failed", "larger than"),
    "outcome_is_large": ("failed", "larger than"),
    "result_is_large": ("failed", f"{RESULT_BYTES + 1} bytes of JSON"),
    "error_is_no_text": ("failed", "half a pair: \\ud800"),
    "nothing": ("succeeded", ""),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the replicas find their files by /proc")
def test_each_concerns_one_rank(make, tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    executor, names = make(), list(ENDS)
    handles = executor.launch_replicas(len(names), "hostile:do", {"names": names}, timeout=None)
    entries = dict(zip(names, results_of(executor, handles), strict=True))
    assert {name: entry["status"] for name, entry in entries.items()} == {
        name: status for name, (status, _) in ENDS.items()
    }
    errors = {name: entry["error"] or "" for name, entry in entries.items()}
    assert [name for name, (_, words) in ENDS.items() if words not in errors[name]] == []
    assert entries["nothing"]["result"] == 1
    assert executor.stream_logs(handles[names.index("attempt_is_a_file")]) == "a line"
    # Its supervisor has lived to the end.
    assert "goes on in its place" not in run_of(handles[0]).log.read_text()
    executor.purge(handles[0])
    assert executor.list_runs() == []


SPOILT = """
import os
import shutil
import time
from pathlib import Path


def spoil(how):
    files = Path(os.readlink("/proc/self/fd/1")).parent
    if os.environ["REPLICA_RANK"] == "0":
        shutil.rmtree(files.parent) if how == "removed" else files.parent.chmod(0o777)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the replicas find their files by /proc")
@pytest.mark.parametrize("how", ["removed", "opened"])
def test_one_that_spoils_its_folder_runs_until_it_is_cancelled(make, tmp_path, how):
    (tmp_path / "spoilt.py").write_text(SPOILT)
    executor = make()
    spoilt, other = handles = executor.launch_replicas(2, "spoilt:spoil", {"how": how})
    folder = run_of(spoilt).replica(0).path
    wait_until(lambda: str(folder) in executor.describe(spoilt).message)
    assert executor.poll(spoilt) is ReplicaState.RUNNING
    executor.cancel(spoilt)
    assert [entry["status"] for entry in results_of(executor, [spoilt])] == ["cancelled"]
    assert executor.poll(other) is ReplicaState.RUNNING
    executor.cancel(other)
    assert {entry["status"] for entry in results_of(executor, handles)} == {"cancelled"}
