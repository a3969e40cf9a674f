"""Disks that are full: nothing is left, and room for temporary files is waited for."""

import errno
import os
import resource

import pytest

from diloco_core import (
    StoreUnavailableError,
)
from diloco_core._retry import Retries
from diloco_core._store._drivers._remote import RemoteStore
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
    with pytest.raises(
        StoreUnavailableError, match=r"cannot be written: File too large. Readers do not see any"
    ):
        getattr(store, write)("k", [bytes(600_000)] * 3)
    assert store.get("k") == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_temporary_folder_that_is_full_leaves_nothing(
    small_s3, small_s3_drivers, tmp_path, monkeypatch, full_disk
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = RemoteStore("s3://bucket/run", small_s3_drivers["fsspec"])
    with pytest.raises(
        StoreUnavailableError, match=r"folder for temporary files.*File too large.*TMPDIR"
    ):
        store.put("large", [bytes(PART_BYTES)] * 2)
    assert small_s3.objects == {}
    assert list(tmp_path.iterdir()) == []


def test_room_in_the_temporary_folder_is_waited_for(
    small_s3, small_s3_drivers, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = RemoteStore(
        "s3://bucket/run", small_s3_drivers["fsspec"], Retries(sleep=lambda _: None)
    )
    real, tries = os.pwrite, []

    def full(descriptor, data, offset):
        tries.append(offset)
        if len(tries) in {2, 4}:
            return real(descriptor, data[:1000], offset)
        if len(tries) < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    store.put("large", [b"a" * PART_BYTES, b"b" * PART_BYTES])
    assert len(tries) == 7
    assert small_s3.objects["run/large"] == b"a" * PART_BYTES + b"b" * PART_BYTES
    monkeypatch.setattr(os, "pwrite", lambda *_: full(tries.clear(), b"", 0))
    store.patience = 0.0
    with pytest.raises(
        StoreUnavailableError, match=r"folder for temporary files.*No space left.*TMPDIR"
    ) as caught:
        store.put("large", [bytes(PART_BYTES)])
    assert not caught.value.lasting
    assert list(tmp_path.iterdir()) == []
