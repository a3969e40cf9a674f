"""Disks that are full: nothing is left, and room for temporary files is waited for."""

import errno
import os
import resource

import pytest

from diloco_core import StoreUnavailableError
from diloco_core._store._open import open_store
from diloco_core._store._transfer import PART_BYTES


@pytest.fixture
def full_disk():
    """Let no file of this process grow beyond a megabyte: the system refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", ["put", "create"])
def test_a_disk_that_is_full_in_the_middle_leaves_nothing(tmp_path, full_disk, write):
    store = open_store(str(tmp_path))
    store.put("k", [b"before"])
    with pytest.raises(StoreUnavailableError, match=r"File too large. Readers do not see any"):
        getattr(store, write)("k", [bytes(600_000)] * 3)
    assert store.get("k") == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


@pytest.fixture
def s3fs(small_s3, small_s3_drivers, remote, tmp_path, monkeypatch):
    """A store that keeps parts of uploads in a temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return remote(small_s3_drivers["fsspec"])


def test_a_temporary_folder_that_is_full_leaves_nothing(s3fs, small_s3, tmp_path, full_disk):
    with pytest.raises(StoreUnavailableError, match=r"temporary files.*File too large.*TMPDIR"):
        s3fs.put("large", [bytes(PART_BYTES)] * 2)
    assert small_s3.objects == {}
    assert list(tmp_path.iterdir()) == []


def test_room_in_the_temporary_folder_is_waited_for(s3fs, small_s3, tmp_path, monkeypatch):
    real, tries = os.pwrite, []

    def full(descriptor, data, offset):
        tries.append(offset)
        if len(tries) in {2, 4}:
            return real(descriptor, data[:1000], offset)
        if len(tries) < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    s3fs.put("large", [b"a" * PART_BYTES, b"b" * PART_BYTES])
    assert len(tries) == 7
    assert small_s3.objects["run/large"] == b"a" * PART_BYTES + b"b" * PART_BYTES
    monkeypatch.setattr(os, "pwrite", lambda *_: full(tries.clear(), b"", 0))
    s3fs.patience = 0.0
    told = r"folder for temporary files.*No space left.*TMPDIR"
    with pytest.raises(StoreUnavailableError, match=told) as caught:
        s3fs.put("large", [bytes(PART_BYTES)])
    assert not caught.value.lasting
    assert list(tmp_path.iterdir()) == []
