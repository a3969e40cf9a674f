"""Stores that fail: what is tried again, and what is not. Real HTTP, both drivers for S3."""

import pytest
from aiobotocore.session import AioSession

from diloco_core import (
    StoreUnavailableError,
)
from diloco_core._retry import Retries
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._remote import RemoteStore


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


def test_patience_ends(small_s3, driver, patient):
    retries, now = patient
    store = RemoteStore("s3://bucket/run", driver, retries)
    small_s3.fail(503, "PUT", times=1000)
    with pytest.raises(StoreUnavailableError, match=r"tried again for up to 20 s"):
        store.put("k", [b"x"])
    assert 10 < now[0] <= 20


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
