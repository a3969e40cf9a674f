"""Exclusive creates at the small S3 with both drivers: lost answers, conflicts, and stores that
ignore conditions.
"""

import pytest

from diloco_core._store._api import creates_once
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._transfer import PART_BYTES


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


def test_a_bit_that_flips_on_its_way_is_no_fault_of_the_store(driver, small_s3):
    small_s3.fail("flip", "GET", times=2, part="/bucket/run/probes/")
    store = RemoteStore("s3://bucket/run", driver)
    small_s3.fail("flip", "GET", part="/bucket/run/probes/")
    assert creates_once(store)
    assert [fault.times for fault in small_s3.faults] == [0, 0]


def test_nor_is_one_that_flips_when_an_answer_was_lost(driver, small_s3):
    """The first create finds its own object, and takes it for another one's."""
    store = RemoteStore("s3://bucket/run", driver)
    small_s3.fail("lose", "PUT", part="/bucket/run/probes/")
    small_s3.fail("flip", "GET", part="/bucket/run/probes/")
    assert creates_once(store)
    assert [fault.times for fault in small_s3.faults] == [0, 0]
    assert [key for key in small_s3.objects if "probes" in key] == []


def test_a_refusal_that_does_not_say_which_condition_failed(store, small_s3):
    small_s3.says_which = False
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert creates_once(store)
