"""What is due runs in real time, whatever becomes of it."""

from __future__ import annotations

import threading
import time

import pytest
from standin_lab import PATIENCE

from diloco_localcloud._server._timeline import Ticker, Timeline

pytestmark = pytest.mark.processes


@pytest.fixture
def timeline():
    return Timeline(0.0, clock=time.monotonic)


@pytest.fixture
def changed():
    return threading.Condition(threading.RLock())


@pytest.fixture
def ticker(timeline, changed):
    running = Ticker(timeline, changed)
    running.start()
    yield running
    running.stop()


def due(timeline, changed, seconds, action):
    with changed:
        timeline.after(seconds, action)
        changed.notify_all()


def test_it_needs_a_timeline_and_its_lock_only(ticker, timeline, changed):
    over = threading.Event()
    due(timeline, changed, 0.02, over.set)
    assert over.wait(PATIENCE)


def test_what_fails_does_not_stop_the_clock(ticker, timeline, changed, caplog):
    over = threading.Event()
    due(timeline, changed, 0.0, lambda: 1 // 0)
    due(timeline, changed, 0.0, over.set)
    assert over.wait(PATIENCE)
    assert "something that was due failed" in caplog.text


def test_what_is_still_to_come_never_does(ticker, timeline, changed):
    ran = []
    due(timeline, changed, 3600, lambda: ran.append(True))
    ticker.stop()
    assert ran == []
    assert timeline.next_due() is not None
