"""The slow link that the proof measures on carries what it says, and no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_core._store._open import open_store

SIZES = st.integers(0, 10_000)
PAUSES = st.floats(0, 20)


class TestTokenBucket:
    @given(st.lists(st.tuples(PAUSES, SIZES), max_size=12), st.floats(1, 1e4), st.floats(0, 1e4))
    def test_it_carries_what_the_bandwidth_allows_and_never_less(self, proof, asked, rate, burst):
        """The last of any bytes in a row comes when the link allows it."""
        now = 0.0

        def sleep(seconds):
            nonlocal now
            now += seconds

        bucket = proof.throttle.TokenBucket(rate, burst, clock=lambda: now, sleep=sleep)
        began, passed = [], []
        for pause, size in asked:
            now += pause
            began.append(now)
            passed.append(size)
            bucket.take(size)
            earliest = max(
                began[first] + (sum(passed[first:]) - burst) / rate for first in range(len(began))
            )
            assert now == pytest.approx(max(began[-1], earliest))
        assert bucket.bytes == sum(passed)

    def test_those_who_ask_at_once_share_it(self, proof, time):
        waits = []
        bucket = proof.throttle.TokenBucket(1000, clock=time.clock, sleep=waits.append)
        for _ in range(3):
            bucket.take(500)
        assert waits == [0.5, 1.0, 1.5]


@pytest.fixture
def link(proof, time):
    """A link of 1,000 bytes per second, whose requests take two seconds.

    After a pause it carries ten bytes at once.
    """
    return proof.throttle.Link(1000, 2.0, clock=time.clock, sleep=time.sleep)


class TestThrottledStore:
    @pytest.fixture
    def took(self, time):
        """Return whether something took so many seconds."""

        def took(seconds, act):
            time.now += 1000  # the link has been idle
            began = time.now
            result = act()
            assert time.now - began == pytest.approx(seconds)
            return result

        return took

    def test_every_operation_takes_its_time(self, proof, link, took, tmp_path):
        store = proof.throttle.ThrottledStore(open_store(str(tmp_path)), link)
        content = bytes(range(250)) * 20
        parts = [content[:3000], content[3000:]]
        assert took(2 + 4.99, lambda: store.put("a/1", iter(parts))) == 5000
        assert took(2 + 4.99, lambda: store.create("a/2", iter(parts)))
        assert took(2 + 0.99, lambda: store.create("a/3", content[:1000]))
        assert not took(2 + 0.99, lambda: store.create("a/3", content[:1000]))
        assert link.up.bytes == 12_000
        assert took(2 + 0.99, lambda: store.get("a/3")) == content[:1000]
        assert took(2, lambda: store.list("a/")) == {"a/1": 5000, "a/2": 5000, "a/3": 1000}
        assert link.down.bytes == 1000
        took(2, lambda: store.delete(["a/3"]))
        assert "a/3" not in store.list("a/")
        assert proof.throttle.BURST == 0.01  # seconds

    def test_only_a_read_elsewhere_takes_a_request(self, proof, link, took, tmp_path):
        store = proof.throttle.ThrottledStore(open_store(str(tmp_path)), link)
        content = bytes(range(250)) * 20
        store.put("a", [content])
        took(2, lambda: store.open("a").close())
        with took(0, lambda: store.open("a", 5000)) as reader:
            buffer = memoryview(bytearray(1000))
            took(2 + 0.99, lambda: reader.read_into(1000, buffer))
            assert bytes(buffer) == content[1000:2000]
            took(0.99, lambda: reader.read_into(2000, buffer))
            took(2 + 0.99, lambda: reader.read_into(0, buffer))
            assert bytes(buffer) == content[:1000]
            assert reader.size == 5000
        assert link.down.bytes == 3000
