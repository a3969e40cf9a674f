"""Trying again: delays grow, jitter shortens them, the time limit holds. No real time passes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import (
    AuthError,
    Backoff,
    InvalidRequestError,
    ThrottledError,
    UnavailableError,
    retry,
)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


def backoff(clock, **options):
    return Backoff(**{"jitter": 0.0, **options}, clock=clock, sleep=clock.sleep)


def test_delays_grow_to_the_cap():
    delays = Backoff(first=1.0, factor=2.0, cap=5.0, jitter=0.0).delays()
    assert list(itertools.islice(delays, 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]


@given(st.floats(0.01, 10), st.floats(1, 4), st.floats(0, 1), st.floats(0, 0.999))
def test_jitter_only_shortens(first, factor, jitter, random):
    bare = Backoff(first=first, factor=factor, cap=100.0, jitter=0.0).delays()
    random_ones = Backoff(
        first=first, factor=factor, cap=100.0, jitter=jitter, uniform=lambda: random
    ).delays()
    for whole, shortened in itertools.islice(zip(bare, random_ones, strict=False), 8):
        assert whole * (1 - jitter) <= shortened <= whole


def test_the_default_randomness_is_random():
    delays = Backoff(first=1.0, factor=1.0, cap=1.0, jitter=1.0).delays()
    assert len(set(itertools.islice(delays, 20))) > 10


@pytest.mark.parametrize(
    "options",
    [
        {"first": 0},
        {"first": 9, "cap": 1},
        {"factor": 0.5},
        {"jitter": 1.5},
        {"first": "1"},
        {"cap": None},
        {"factor": 10**400},
        {"jitter": True},
        {"first": float("nan")},
    ],
)
def test_impossible_settings_are_refused(options):
    with pytest.raises(InvalidRequestError, match="back-off needs"):
        Backoff(**options)


def failing(*errors):
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_retryable_errors_are_tried_again():
    clock = Clock()
    call = failing(UnavailableError("a"), UnavailableError("b"))
    assert retry(call, backoff(clock, first=1.0), timeout=60) == "done"
    assert clock.slept == [1.0, 2.0]


def test_the_backends_own_delay_wins():
    clock = Clock()
    assert (
        retry(failing(ThrottledError("slow down", retry_after=7.0)), backoff(clock), timeout=60)
        == "done"
    )
    assert clock.slept == [7.0]


def test_others_are_raised_at_once():
    clock = Clock()
    with pytest.raises(AuthError):
        retry(failing(AuthError("expired")), backoff(clock), timeout=60)
    with pytest.raises(ZeroDivisionError):
        retry(failing(ZeroDivisionError()), backoff(clock), timeout=60)
    assert clock.slept == []


def test_it_gives_up_in_time():
    clock = Clock()
    with pytest.raises(UnavailableError) as caught:
        retry(
            failing(*[UnavailableError("down")] * 99),
            backoff(clock, first=1.0, cap=8.0),
            timeout=20,
        )
    assert clock.now - 100.0 <= 20
    assert "given up after 20 s" in caught.value.__notes__[0]
