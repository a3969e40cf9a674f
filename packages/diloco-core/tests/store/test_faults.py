"""Stores that fail: what is tried again, and what is not. Real HTTP, both drivers for S3."""

import pytest

from diloco_core import StoreUnavailableError


@pytest.mark.parametrize("what", [500, 503, 429, "drop", "lose", "cut"])
def test_what_may_pass_is_tried_again(store, small_s3, what):
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


@pytest.mark.parametrize(
    ("jitter", "first"),
    [(1.0, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]), (0.0, [0.1, 0.2, 0.4, 0.8, 1.6, 2.5])],
)
def test_pauses_grow_have_jitter_and_end(
    small_s3, driver, remote, clock, monkeypatch, jitter, first
):
    pauses, sleep = [], clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    store = remote(driver, jitter=jitter)
    small_s3.fail(503, "PUT", times=1000)
    with pytest.raises(StoreUnavailableError, match=r"tried again for up to 60 s"):
        store.put("k", [b"x"])
    assert pauses[:6] == pytest.approx(first)
    assert sum(pauses) <= 60 < sum(pauses) + first[-1]


def test_what_will_not_pass_is_not_tried_again(store, small_s3, clock):
    small_s3.fail(400, "PUT", times=9, code="InvalidRequest")
    told = r"cannot write object 'k' in s3://bucket/run: .*InvalidRequest"
    with pytest.raises(StoreUnavailableError, match=told):
        store.put("k", [b"x"])
    assert clock.now == 0
