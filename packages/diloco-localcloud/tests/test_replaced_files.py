"""Programs that replace a file that a stand-in reads: it does not wait, and takes no memory."""

from __future__ import annotations

import os
import tracemalloc
import types

import pytest

from diloco_localcloud._aws._processes._folder import JobFolder
from diloco_localcloud._kubernetes._processes._sandbox import Sandbox

BIG = 1 << 27


def big(path):
    path.touch()
    os.truncate(path, BIG)


def link(path):
    target = path.with_name("target")
    target.write_bytes(b"kept")
    path.symlink_to(target)


def message(folder):
    (folder / "main").mkdir()
    sandbox = Sandbox(None, folder, {})
    return folder / "main/termination", lambda: sandbox.message({"name": "main"}, failed=True)


def reason(folder):
    job = JobFolder(types.SimpleNamespace(name="job", request={}), folder, None)
    return job.root / "output/failure", lambda: job.reason(3)


READERS = [(message, ""), (reason, "AlgorithmError: , exit code: 3")]


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, link])
@pytest.mark.parametrize(("reader", "nothing"), READERS)
def test_what_is_no_file_is_not_read(tmp_path, reader, nothing, put):
    path, read = reader(tmp_path)
    put(path)
    assert read() == nothing


@pytest.mark.parametrize("reader", [reader for reader, _ in READERS])
def test_a_file_of_any_size_takes_no_memory(tmp_path, reader):
    path, read = reader(tmp_path)
    big(path)
    tracemalloc.start()
    try:
        read()
        assert tracemalloc.get_traced_memory()[1] < BIG / 100
    finally:
        tracemalloc.stop()
