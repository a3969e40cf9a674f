import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local import _files
from diloco_local._files import (
    create_json,
    is_locked,
    open_lock,
    read_json,
    read_tail,
    try_lock,
    write_json,
)
from diloco_protocol import BackendError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON.filter(lambda value: value is not None))
def test_what_was_written_is_read(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("f") / "x.json"
    write_json(path, value)
    assert read_json(path) == value
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


def test_a_missing_file_is_none(tmp_path):
    assert read_json(tmp_path / "no" / "such.json") is None


def test_null_is_no_missing_file(tmp_path):
    write_json(tmp_path / "x.json", None)
    with pytest.raises(BackendError, match="is null"):
        read_json(tmp_path / "x.json")


def test_what_cannot_be_read_is_an_error_of_ours(tmp_path, monkeypatch):
    (tmp_path / "x.json").touch()

    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(_files, "open_own_stream", refuse)
    with pytest.raises(BackendError, match=r"x\.json cannot be read: not yours"):
        read_json(tmp_path / "x.json")


def test_only_the_owner_may_read(tmp_path):
    write_json(tmp_path / "x", 1)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_no_file(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(tmp_path / "x.json", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.processes
def test_create_has_one_winner(tmp_path):
    path = tmp_path / "once.json"
    won = []
    gate = threading.Barrier(8)

    def contend(k):
        gate.wait()
        if create_json(path, k):
            won.append(k)

    threads = [threading.Thread(target=contend, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert json.loads(path.read_text()) == won[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["once.json"]


@pytest.mark.processes
def test_readers_never_see_a_part(tmp_path):
    path = tmp_path / "big.json"
    write_json(path, ["a"] * 100_000)
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            seen.append(len(read_json(path)))

    thread = threading.Thread(target=read)
    thread.start()
    for k in range(20):
        write_json(path, ["b" * (k % 2)] * (50_000 * (1 + k % 2)))
    stop.set()
    thread.join()
    assert set(seen) <= {50_000, 100_000}


def test_a_lock_is_seen_and_released(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    first, second = open_lock(path), open_lock(path)
    try:
        assert try_lock(first)
        assert is_locked(path)
        assert not try_lock(second)
        os.close(first)
        first = -1
        assert not is_locked(path)
        assert try_lock(second)
    finally:
        for descriptor in {first, second} - {-1}:
            os.close(descriptor)


@pytest.mark.processes
def test_a_lock_lives_as_long_as_one_of_two_processes(tmp_path):
    """The guardian and the supervisor share one open file: the lock must outlive either of them."""
    path = tmp_path / "lock"
    descriptor = open_lock(path)
    assert try_lock(descriptor)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.close(descriptor)
    try:
        assert is_locked(path)
    finally:
        os.close(writer)
        os.waitpid(child, 0)
    assert not is_locked(path)


@pytest.mark.parametrize("behind", [1, 1990, 2001])
def test_a_secret_whose_name_is_in_front_of_the_end_of_a_log_is_not_shown(tmp_path, behind):
    log = tmp_path / "log"
    log.write_text(f"DB_PASSWORD=hunter2hunter2 {'y' * behind}")
    tail = read_tail(log)
    assert "hunter" not in tail
    assert tail.endswith("y" * min(behind, 2000))
    assert len(tail) <= 2000
    assert read_tail(tmp_path / "none") == ""
