"""Stores that fail: what is tried again, what is not, and what a lost answer means. Real HTTP, both drivers for S3."""

import errno
import gc
import os
import resource
import sys
import threading
import weakref

import fsspec
import pytest
from aiobotocore.session import AioSession

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from diloco_core._retry import Retries
from diloco_core._store._api import creates_once
from diloco_core._store._drivers import _remote as _store_remote
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._obstore import ObstoreDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_core._store._transfer import PART_BYTES, Transfer
from diloco_protocol import MissingDependencyError


@pytest.fixture(params=["obstore", "fsspec"])
def driver(request, small_s3_drivers):
    """Each driver for S3, at the small S3."""
    return small_s3_drivers[request.param]


@pytest.fixture
def slept():
    """The pauses that were made."""
    return []


@pytest.fixture
def store(small_s3, driver, slept):
    """A store on the small S3 whose pauses take no time."""
    opened = RemoteStore("s3://bucket/run", driver, Retries(sleep=slept.append, jitter=lambda: 0.5))
    small_s3.log.clear()
    yield opened
    executor = opened._transfers._executor
    opened.close()
    if executor is not None:
        executor.shutdown(wait=True)  # what is under way would be in the next test's log


@pytest.mark.parametrize("what", [500, 503, 429, "drop", "lose", "cut"])
def test_what_may_pass_is_tried_again(store, small_s3, slept, what):
    store.put("k", [b"value" * 100])
    for act, method in (
        (lambda: store.put("other", [b"other"]), "PUT"),
        (lambda: store.get("k"), "GET"),
        (lambda: store.list(""), "GET"),
        (lambda: store.open("k").close(), "GET"),
        (lambda: store.open("k").close(), "HEAD"),
    ):
        small_s3.fail(what, method, times=2)
        act()
        small_s3.faults.clear()
    assert store.get("k") == b"value" * 100
    assert sorted(store.list("")) == ["k", "other"]
    assert all(0 < pause <= 5 for pause in slept)


def test_pauses_grow_and_have_jitter():
    def attempts(jitter):
        now, pauses = [0.0], []

        def sleep(seconds):
            pauses.append(seconds)
            now[0] += seconds

        retries = Retries(clock=lambda: now[0], sleep=sleep, jitter=lambda: jitter)
        with pytest.raises(OSError, match="down"):
            retries.run(lambda: (_ for _ in ()).throw(OSError("down")), lambda error: True)
        return pauses

    late, early = attempts(1.0), attempts(0.0)
    assert late[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert early[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.5])
    assert sum(late) <= 60 < sum(late) + 5
    assert sum(early) <= 60 < sum(early) + 2.5


def test_what_will_not_pass_is_not_tried_again(store, small_s3, slept):
    small_s3.fail(400, "PUT", times=9, code="InvalidRequest")
    with pytest.raises(
        StoreUnavailableError, match=r"cannot write object 'k' in s3://bucket/run: .*InvalidRequest"
    ):
        store.put("k", [b"x"])
    assert slept == []


def test_patience_ends(small_s3, driver):
    retries, now = patient_clock()
    store = RemoteStore("s3://bucket/run", driver, retries)
    small_s3.fail(503, "PUT", times=1000)
    with pytest.raises(StoreUnavailableError, match=r"tried again for up to 20 s"):
        store.put("k", [b"x"])
    assert 10 < now[0] <= 20


def patient_clock():
    """Retries whose pauses take no time, and the time that they took."""
    now = [0.0]
    return Retries(
        patience=20, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    ), now


class TestCreatesWhoseAnswerIsLost:
    @pytest.mark.parametrize("what", ["lose", 500])
    def test_it_is_ours_if_the_content_is(self, store, small_s3, what):
        small_s3.fail(what, "PUT", part="claim")
        assert store.create("claim", b"mine")
        assert small_s3.objects["run/claim"] == b"mine"

    def test_it_is_not_if_somebody_else_was_first(self, store, small_s3):
        assert store.create("claim", b"theirs")
        small_s3.fail("lose", "PUT", part="claim")
        assert not store.create("claim", b"mine")
        assert store.get("claim") == b"theirs"

    def test_a_conflict_of_two_writers_is_tried_again(self, store, small_s3, slept):
        small_s3.fail(409, "PUT", times=3, part="claim", code="ConditionalRequestConflict")
        assert store.create("claim", b"mine")
        assert len(slept) == 3

    def test_a_conflict_that_the_other_wins(self, store, small_s3):
        small_s3.fail(409, "PUT", part="claim", code="ConditionalRequestConflict")
        small_s3.objects["run/claim"] = b"theirs"
        assert not store.create("claim", b"mine")

    def test_a_large_object_counts_as_anothers(self, store, small_s3):
        data = bytes(PART_BYTES + 1)
        small_s3.fail("lose", "PUT", part="claim")
        assert not store.create("claim", data)
        assert store.get("claim") == data

    def test_it_exists_and_is_gone_before_it_is_read(self, store, small_s3):
        small_s3.objects["run/claim"] = b"theirs"
        small_s3.fail(404, "GET", part="claim", code="NoSuchKey")
        assert not store.create("claim", b"mine")


def test_a_store_that_ignores_conditions_is_found_out(store, small_s3):
    small_s3.conditions = False
    assert store.create("k", b"first")
    assert store.create("k", b"second"), "it says it wrote, and it did: over the first"
    assert not creates_once(store)
    assert [key for key in small_s3.objects if "probes" in key] == []


def test_a_store_that_heeds_them_passes(store):
    assert creates_once(store)


def test_a_driver_that_takes_long_to_load_does_not_use_up_the_patience(small_s3, monkeypatch, lab):
    """The first request may fail as any other, and is tried again."""
    clock, create = lab.Clock(), AioSession.create_client

    def slowly(*arguments, **options):
        clock.sleep(10.0)
        return create(*arguments, **options)

    monkeypatch.setattr(AioSession, "create_client", slowly)
    small_s3.fail(503, "PUT", part="/bucket/run/probes/")
    RemoteStore(
        "s3://bucket/run", FsspecDriver("s3://bucket/run"), Retries(clock=clock, sleep=clock.sleep)
    )
    assert clock() >= 10.0
    assert [fault.times for fault in small_s3.faults] == [0]


def test_a_bit_that_flips_on_its_way_is_no_fault_of_the_store(driver, small_s3):
    small_s3.fail("flip", "GET", times=2, part="/bucket/run/probes/")
    store = RemoteStore("s3://bucket/run", driver)
    small_s3.fail("flip", "GET", part="/bucket/run/probes/")
    assert creates_once(store)
    assert [fault.times for fault in small_s3.faults] == [0, 0]


def test_a_refusal_that_does_not_say_which_condition_failed(store, small_s3):
    small_s3.says_which = False
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert creates_once(store)


def test_parts_of_an_upload_are_sent_again(store, small_s3):
    data = bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"
    for what in (500, "drop"):
        small_s3.fail(what, "PUT", times=1, part="partNumber=2")
        small_s3.fail(what, "POST", times=1, part="uploads")
        assert store.put("large", iter([data])) == len(data)
        assert small_s3.objects["run/large"] == data
    assert small_s3.uploads == {}


def test_an_upload_that_fails_leaves_nothing(store, small_s3):
    small_s3.fail(400, "PUT", times=99, part="partNumber=3", code="InvalidPart")
    with pytest.raises(StoreUnavailableError, match=r"cannot write object 'large'.*InvalidPart"):
        store.put("large", [bytes(PART_BYTES)] * 3)
    assert list(small_s3.objects) == []
    assert small_s3.uploads == {}


def test_uploads_and_reads_run_several_at_a_time_in_bounded_memory(store, small_s3, monkeypatch):
    made, size = [], 8 * PART_BYTES
    store = RemoteStore(store.uri, store.driver, transfer=Transfer(budget_bytes=4 * PART_BYTES))

    def parts():
        for _ in range(8):
            made.append(
                sum(len(part) for upload in small_s3.uploads.values() for part in upload.values())
            )
            yield bytes(PART_BYTES)

    if (
        store.driver.name == "obstore"
    ):  # the server answers two parts at a time, and never one alone
        small_s3.gate, small_s3.gated = threading.Barrier(2), ("PUT", "partNumber=")
    store.put("large", parts())
    small_s3.gate = None
    assert len(small_s3.objects["run/large"]) == size
    if store.driver.name == "obstore":
        held = [number * PART_BYTES - there for number, there in enumerate(made)]
        assert max(held) <= 4 * PART_BYTES, "made, but not yet there"
    small_s3.log.clear()
    with store.open("large") as reader:
        reader.expect(100, size)
        buffer = bytearray(PART_BYTES // 2)
        for start in range(100, size - len(buffer), len(buffer)):
            assert reader._transfers.held <= 4 * PART_BYTES
            reader.read_into(start, memoryview(buffer))


@pytest.mark.parametrize("first", [0, 100, 65_536, 200_000])
def test_reading_asks_for_what_was_announced_and_for_nothing_else(store, small_s3, first):
    content = small_s3.objects["run/k"] = bytes(range(256)) * 4096
    with store.open("k") as reader:
        small_s3.log.clear()
        small_s3.served = 0
        reader.expect(first, 900_000)
        buffer = bytearray(1000)
        for start in range(first, 900_000 - 1000, 1000):
            reader.read_into(start, memoryview(buffer))
            assert bytes(buffer) == content[start : start + 1000]
        assert len(small_s3.log) == 1, "256 KiB or more with each request"
        here = 65_536 if store.driver.name == "obstore" else 0  # came when the object was opened
        assert small_s3.served == 900_000 - max(first, here)


def test_what_was_announced_may_be_passed_over(store, small_s3, monkeypatch):
    content = small_s3.objects["run/k"] = bytes(range(256)) * 8192
    monkeypatch.setattr(store._transfers, "block_bytes", 256 * 2**10)
    with store.open("k") as reader:
        reader.expect(100, 2_000_000)
        buffer = bytearray(1000)
        for start in (500_000, 1_500_000, 100, 1_900_000):
            reader.read_into(start, memoryview(buffer))
            assert bytes(buffer) == content[start : start + 1000]


def test_a_range_that_comes_short_is_damage(store, small_s3):
    small_s3.objects["run/k"] = bytes(500_000)
    with store.open("k") as reader:
        small_s3.objects["run/k"] = bytes(300_000)
        with pytest.raises(
            CorruptedObjectError,
            match=r"s3://bucket/run/k: .* were requested, and the store sent 50000",
        ):
            reader.read_into(250_000, memoryview(bytearray(200_000)))
        del small_s3.objects["run/k"]
        with pytest.raises(ObjectNotFoundError, match="'k'"):
            reader.read_into(100_000, memoryview(bytearray(1000)))


def test_listings_go_over_all_pages(store, small_s3):
    small_s3.page = 3
    for number in range(10):
        store.put(f"many/{number}", [b"x"])
    assert list(store.list("many/")) == [f"many/{number}" for number in range(10)]


@pytest.fixture
def full_disk():
    """From now on, no file of this process can grow beyond a megabyte: the system refuses the write."""
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


class TestBadPlaces:
    @pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
    def test_a_bucket_that_does_not_exist(self, small_s3, scheme):
        with pytest.raises(
            StoreUnavailableError, match=r"s3://nowhere/run .*bucket does not exist: create it"
        ):
            open_store(f"{scheme}://nowhere/run")
        with pytest.raises(
            StoreUnavailableError, match=r"s3://nowhere/run .*bucket does not exist: create it"
        ):
            open_store(f"{scheme}://nowhere/run", reading=True)

    @pytest.mark.parametrize("method", ["PUT", "GET"])
    def test_a_bucket_that_is_forbidden(self, small_s3, driver, method):
        small_s3.fail(403, method, times=99, code="AccessDenied")
        with pytest.raises(
            StoreUnavailableError, match=r"Access was denied: .* may put, get, list and delete"
        ):
            RemoteStore("s3://bucket/run", driver)

    def test_a_store_that_is_down(self, small_s3, driver):
        small_s3.fail(503, "PUT", times=10**6)
        retries, now = patient_clock()
        with pytest.raises(
            StoreUnavailableError, match=r"cannot write .* tried again for up to 5 s"
        ):
            RemoteStore("s3://bucket/run", driver, retries)
        assert now[0] <= 5

    def test_one_that_is_only_read_need_not_be_writable(self, small_s3, driver):
        small_s3.objects["run/k"] = b"value"
        small_s3.fail(403, "PUT", times=99, code="AccessDenied")
        small_s3.fail(403, "DELETE", times=99, code="AccessDenied")
        assert RemoteStore("s3://bucket/run", driver, reading=True).get("k") == b"value"

    def test_one_that_is_only_read_and_is_down(self, small_s3, driver):
        small_s3.fail(503, "GET", times=10**6)
        retries, now = patient_clock()
        with pytest.raises(
            StoreUnavailableError, match=r"cannot be listed: .* tried again for up to 5 s"
        ):
            RemoteStore("s3://bucket/run", driver, retries, reading=True)
        assert now[0] <= 5

    @pytest.mark.parametrize("kind", [ObstoreDriver, FsspecDriver])
    def test_no_credentials(self, small_s3, monkeypatch, kind):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv(
            "AWS_METADATA_ENDPOINT", "http://127.0.0.1:1"
        )  # where obstore asks a cloud machine's role
        with pytest.raises(StoreUnavailableError, match=r"s3://bucket/run.*[Cc]redentials"):
            RemoteStore("s3://bucket/run", kind("s3://bucket/run"), patient_clock()[0])


class TestChoice:
    def test_obstore_where_it_is_installed(self, small_s3):
        assert isinstance(open_store("s3://bucket/run").driver, ObstoreDriver)

    def test_fsspec_where_it_has_settings_for_s3(self, small_s3, monkeypatch):
        monkeypatch.setitem(fsspec.config.conf, "s3", {"default_fill_cache": False})
        assert isinstance(open_store("s3://bucket/run").driver, FsspecDriver)

    def test_fsspec_where_obstore_is_not_installed(self, small_s3, monkeypatch):
        monkeypatch.setitem(sys.modules, "obstore", None)
        assert isinstance(open_store("s3://bucket/run").driver, FsspecDriver)
        with pytest.raises(MissingDependencyError, match=r"pip install 'diloco-core\[obstore\]'"):
            open_store("obstore+s3://bucket/run")

    def test_by_hand(self, small_s3):
        assert isinstance(open_store("obstore+s3://bucket/run").driver, ObstoreDriver)
        assert open_store("fsspec+memory://by/hand").driver.near

    def test_obstore_is_for_s3_only(self):
        with pytest.raises(ConfigurationError, match=r"write 'gs://bucket/run'"):
            open_store("obstore+gs://bucket/run")

    def test_a_uri_without_a_bucket(self):
        with pytest.raises(ConfigurationError, match="names no bucket"):
            open_store("obstore+s3:///run")


class _Block(bytearray):
    """Bytes that can be asked whether they are still there."""


@pytest.mark.parametrize("act", ["create", "put"])
def test_what_could_not_be_written_is_let_go_of_at_once(store, small_s3, monkeypatch, act):
    """An error that held on to it would hold it until the next garbage collection: the memory of a whole shard."""
    blocks, real = [], _store_remote.blocks_of

    def watched(parts, size):
        for block in real(parts, size):
            kept = _Block(block)
            blocks.append(weakref.ref(kept))
            yield kept

    monkeypatch.setattr(_store_remote, "blocks_of", watched)
    if act == "create":
        small_s3.objects["run/large"] = b"theirs"
    else:
        small_s3.fail(400, "PUT", times=99, code="InvalidRequest")
        small_s3.fail(400, "POST", times=99, code="InvalidRequest")
    gc.collect()
    gc.disable()
    try:
        if act == "create":
            assert not store.create("large", iter([bytes(2**20)] * 20))
        else:
            with pytest.raises(StoreUnavailableError):
                store.put("large", iter([bytes(2**20)] * 20))
        assert blocks
        assert [block for block in blocks if block() is not None] == []
    finally:
        gc.enable()
