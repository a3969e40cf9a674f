"""Stores that are away for a while: for how long they are waited for, and how long that took."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco_core import CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError, Timing
from diloco_core._store._api import RECORD_BYTES
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient


@pytest.fixture
def driver(failing_driver, clock):
    """The store is away until some time; a try that fails takes a second."""

    def fails():
        if clock() < made.until:
            clock.now += 1
            return True
        return False

    made = failing_driver(fails)
    made.until = 0.0
    return made


@pytest.fixture
def store(driver, remote):
    return remote(driver, "far://run", jitter=1.0)


def test_an_outage_shorter_than_patience_is_waited_out_and_counted(store, driver, clock):
    assert store.downtime == 0.0
    store.patience = 1800.0
    clock.now, driver.until = 100.0, 1500.0
    store.put("k", [b"x"])
    assert 1500 <= clock.now < 1510
    assert store.downtime == clock.now - 100, "from the beginning of the first try that failed"
    before = store.downtime
    clock.now += 1000
    assert store.get("k") == b"x"
    assert store.downtime == before, "nothing is counted while the store is there"


def test_a_longer_one_is_an_error_and_counts_too(store, driver, clock):
    store.patience = 30.0
    driver.until = 1000.0
    with pytest.raises(StoreUnavailableError, match="tried again for up to 30 s") as caught:
        store.list("")
    assert not caught.value.lasting
    assert store.downtime == clock.now
    assert 20 < clock.now < 32


def test_what_is_not_there_is_no_outage(store, clock):
    with pytest.raises(ObjectNotFoundError):
        store.get("k")
    assert (store.downtime, clock.now) == (0.0, 0.0)


def test_requests_that_wait_at_the_same_time_count_once(store, driver, clock):
    put, tries = driver.put, []

    def fails_late(*args, **options):
        """Meanwhile another request waits, and succeeds: the first time before this one waits."""
        tries.append(clock.now)
        if len(tries) == 3:
            return put(*args, **options)
        driver.until = clock.now + 5
        store.list("")
        clock.now += 2
        raise OSError("no answer")

    driver.put = fails_late
    clock.now = 100.0
    store.put("k", [b"x"])
    end = clock.now
    clock.now += 1000
    assert store.downtime == pytest.approx(end - 100)


def test_however_long_the_first_try_took_there_is_a_second(store, driver, clock):
    put, tries = driver.put, []

    def slow(*args, **options):
        tries.append(clock.now)
        if len(tries) > 1:
            return put(*args, **options)
        clock.now += 100
        raise OSError("no answer")

    driver.put, store.patience = slow, 5
    store.put("k", [b"x"])
    assert len(tries) == 2


def test_threads_that_wait_together_are_all_counted_out(store, driver, clock):
    store.patience = 1e6  # virtual seconds, since others may keep one thread waiting for long

    def fail(_):
        driver.until = clock.now + 0.5
        store.list("")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(200)))
    before = store.downtime
    clock.now += 100.0
    assert store.downtime == before


def test_only_a_long_outage_is_told_in_the_log(store, driver, clock, caplog):
    store.patience = 1800.0
    driver.until = clock.now + 5
    store.put("k", [b"x"])
    assert not caplog.records
    driver.until = clock.now + 200
    store.put("k", [b"x"])
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 3 <= len(texts) <= 4
    assert all("cannot write 'k' in far://run: outside: no answer" in line for line in texts)


class TestPatient:
    """Stores that leave trying again to others."""

    @pytest.fixture
    def away(self, tmp_path, clock, monkeypatch):
        """A folder whose records cannot be read until some time."""
        store = open_store(str(tmp_path))
        store.put("k", [b"x"])
        real = store.get

        def get(key, *largest):
            if clock() < store.until:
                raise StoreUnavailableError("the server is away", lasting=store.lasting)
            return real(key, *largest)

        store.get, store.until, store.lasting = get, 0.0, False
        yield store
        store.close()

    @pytest.fixture
    def timing(self, clock):
        return Timing(clock=clock, sleep=clock.sleep)

    def test_it_waits_as_long_as_the_store_says(self, away, clock, timing):
        patient = Patient(away, timing)
        patient.patience = 900.0
        assert away.patience == 900.0
        away.until = 800.0
        assert patient.get("k") == b"x"
        assert 800 <= clock.now < 803
        assert patient.downtime == clock.now
        away.until = 10_000.0
        text = r"^the server is away\. It was tried again for 899 s\.$"
        with pytest.raises(StoreUnavailableError, match=text) as caught:
            patient.get("k")
        assert not caught.value.lasting

    def test_what_lasts_is_not_waited_for(self, away, clock, timing):
        away.lasting, away.until = True, 800.0
        text = r"away\. It was tried again for 3 s, and no longer, since this does"
        with pytest.raises(StoreUnavailableError, match=text):
            Patient(away, timing).get("k")
        assert clock.now == pytest.approx(3.1)

    @pytest.mark.parametrize(
        ("call", "number", "to_mend"),
        [
            ("write", errno.ENOSPC, "The disk is full, or this user's quota is used up: make room"),
            ("fsync", errno.EDQUOT, "The disk is full, or this user's quota is used up: make room"),
            ("mkdir", errno.EROFS, "The file system is read-only: make it writable again"),
            ("open", errno.EROFS, "The file system is read-only: make it writable again"),
            ("link", errno.ENOSPC, "The disk is full, or this user's quota is used up: make room"),
            ("write", errno.EFBIG, "raise that limit. More fragments make smaller files"),
        ],
    )
    def test_what_can_be_mended_is_waited_for_and_told(
        self, tmp_path, clock, timing, monkeypatch, caplog, number, to_mend, call
    ):
        """Somebody who reads the log makes room, or makes the file system writable."""
        store = Patient(open_store(str(tmp_path)), timing)
        store.patience = 1800.0
        real = getattr(os, call)

        def full(*args, **options):
            if clock() < 200 and (call != "open" or args[1] & os.O_CREAT):
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        monkeypatch.setattr(os, call, full)
        assert store.create("claims/0", lambda: [b"mine"])
        assert 200 <= clock.now < 203
        assert store.downtime == clock.now, "which counts towards nobody's lost_after"
        assert store.get("claims/0") == b"mine"
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(texts) == 4, "at once, and once a minute"
        assert all(to_mend in line for line in texts)
        assert texts[0].startswith("trying again: ")
        assert texts[1].startswith("trying again, for 6")

    def test_a_full_disk_gets_back_what_was_kept(self, tmp_path, clock, timing, monkeypatch):
        folder = open_store(str(tmp_path))
        folder.put("deltas/0", [bytes(2**17)])
        folder.delete(["deltas/0"], unread=True)
        kept = list(tmp_path.glob(".tmp-*"))
        assert len(kept) == 1
        real = os.write

        def full(*args):
            if kept[0].exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        monkeypatch.setattr(os, "write", full)
        store = Patient(folder, timing)
        assert store.put("state/0", lambda: [bytes(2**17)]) == 2**17
        assert clock.now < 1

    def test_it_reads_records_only(self, away):
        patient = Patient(away, Timing())
        away.put("large", [bytes(2**20)] * 65)
        with pytest.raises(CorruptedObjectError, match=f"at most {RECORD_BYTES} bytes"):
            patient.get("large")
        assert len(patient.get("large", 2**27)) == 65 * 2**20
        assert patient.peek("large") == b""
        assert (patient.peek("k"), patient.peek("gone")) == (b"x", None)

    def test_it_does_not_repeat_what_the_store_says_of_its_tries(self, store, driver, timing):
        patient = Patient(store, timing)
        patient.patience = 30.0
        driver.until = 1000.0
        with pytest.raises(StoreUnavailableError) as caught:
            patient.list("")
        assert str(caught.value).count("tried again") == 1
        assert str(caught.value).endswith(
            ": outside: no answer. It was tried again for up to 30 s."
        )


@pytest.mark.parametrize("name", ["obstore", "fsspec"])
def test_hardly_anything_is_sent_of_what_is_too_large(small_s3, small_s3_drivers, remote, name):
    store = remote(small_s3_drivers[name])
    small_s3.objects.update({"run/commit": bytes(65 * 2**20), "run/small": b"record"})
    small_s3.log.clear()
    assert store.get("small") == b"record"
    assert len(small_s3.log) == 1, "a record is one request"
    small_s3.served = 0
    with pytest.raises(CorruptedObjectError, match=f"run/commit has {65 * 2**20} bytes, and at"):
        store.get("commit")
    if name == "fsspec":  # with obstore, the server counts what it had put into the socket
        assert small_s3.served <= 2**20
    assert store.create("commit", b"record") is False, "what is there is not this"
