"""The objects of a history are few, whatever a week brings, and what is lost is counted."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_core import Clipped, ConfigurationError, SyncReport
from diloco_core._exchange._history import HistoryLines
from diloco_core._exchange._telemetry import Logged, line_of
from diloco_protocol.telemetry import (
    HISTORY_BYTES,
    LINE_BYTES,
    HistoryKey,
    Live,
    Phase,
    SyncLine,
    newest_keys,
    read_history,
)

MINUTE = 60.0
WEEK = 7 * 24 * 60


class Written:
    """A history that is written once a minute to a store that takes everything, or nothing."""

    def __init__(self):
        self.lines = HistoryLines(3, 1)
        self.objects = {}
        self.puts = 0

    def sync(self, minute, size):
        number = self.lines.number + 1
        self.lines.add(
            b"%d" % number + b" " * (size - len(b"%d\n" % number)) + b"\n", minute * MINUTE
        )

    def put(self, minute):
        newest = self.lines.newest()
        if newest is None:
            return
        self.puts += 1
        self.objects[newest.key] = newest.data
        self.lines.written(newest.key, minute * MINUTE)
        self.objects.pop(newest.former, None)

    def numbers(self):
        return [
            int(line)
            for key in newest_keys(self.objects)
            for line in self.objects[key.key].splitlines()
        ]


def test_the_newest_object_grows_and_its_name_says_how_far():
    run = Written()
    for minute in range(1, 4):
        run.sync(minute, 500)
        run.put(minute)
        run.put(minute)  # nothing new
    assert list(run.objects) == [HistoryKey(3, 1, 1, 3).key]
    assert run.numbers() == [1, 2, 3]
    assert run.puts == 3


def test_an_object_is_sealed_when_it_has_covered_enough_time_or_is_full():
    run = Written()
    for minute in (1, 10, 11):
        run.sync(minute, 500)
        run.put(minute)
    assert [(key.first, key.last) for key in newest_keys(run.objects)] == [(1, 2), (3, 3)]
    for _ in range(HISTORY_BYTES // LINE_BYTES):
        run.sync(12, LINE_BYTES)
    run.put(12)  # the last one has no room beside the line before
    run.put(12)
    assert [key.first for key in newest_keys(run.objects)] == [1, 3, 35]
    assert run.numbers() == [*range(1, 36)]


def test_what_could_not_be_written_waits_and_then_is_left_out_and_counted():
    run = Written()
    for _ in range(100):
        run.sync(1, LINE_BYTES)
        run.lines.newest()  # which nobody can write
    held = 2 * HISTORY_BYTES // LINE_BYTES
    assert run.lines.dropped == 100 - held
    for _ in range(4):
        run.put(2)
    assert run.numbers() == [*range(1, held + 1)]
    run.sync(3, LINE_BYTES)
    run.put(3)
    assert run.numbers()[-1] == 101


@pytest.mark.sampled
@pytest.mark.parametrize(
    "pattern",
    [
        [(1, 1, 500, True)],
        [(1, 4, LINE_BYTES, True)],
        [(1, 10, 1500, True)],
        [(600, 60, 1500, True), (1, 1, LINE_BYTES, True)],
        [(1, 2, 1500, True), (1, 2, 1500, False)],  # every other day the store is away
    ],
)
def test_a_week_of_a_replica_is_at_most_500_objects(pattern):
    """Every so many minutes so many syncs of so many bytes; a day of each."""
    run = Written()
    for minute in range(1, WEEK + 1):
        every, syncs, size, works = pattern[minute // 1440 % len(pattern)]
        for _ in range(syncs if minute % every == 0 else 0):
            run.sync(minute, size)
        if works:
            run.put(minute)
    while run.lines.newest() is not None:
        run.put(WEEK)
    assert len(run.objects) <= 500
    assert all(len(data) <= HISTORY_BYTES for data in run.objects.values())
    numbers = run.numbers()
    assert numbers == sorted(set(numbers))
    assert len(numbers) + run.lines.dropped == run.lines.number


@pytest.mark.sampled
@pytest.mark.parametrize("seconds", [20, 60, 300])
def test_a_run_of_usual_pace_loses_nothing_in_a_week(seconds):
    run = Written()
    due = 0.0
    for minute in range(1, WEEK + 1):
        while due < minute * MINUTE:
            due += seconds
            run.sync(minute, 700)
        run.put(minute)
    assert run.lines.dropped == 0
    assert len(run.objects) < 260


whole = st.integers(0, 2**62)
seconds = st.floats(-1e9, 1e9) | st.just(-1e-17)
share = st.floats(0, 1)
metrics = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.floats() | st.integers(-(2**62), 2**62) | st.text(max_size=20),
    max_size=8,
)
live = Live(
    run="", rank=0, world_size=1, epoch=1, host="\x1b\ud800", time=0.0, step=0, sync=0,
    phase=Phase.IDLE,
)  # fmt: skip
reports = st.builds(
    SyncReport,
    sync=whole,
    fragment=st.text(max_size=300),
    committed=st.booleans(),
    members=st.integers(0, 64) | st.just(65),
    bytes_sent=whole,
    bytes_received=whole,
    wait_seconds=seconds,
    exchange_seconds=seconds,
    compute_seconds=seconds,
    hidden_seconds=seconds,
    exposed_seconds=seconds,
    total_inner_steps=whole,
    outer_lr=st.none() | share | st.lists(share, max_size=8).map(tuple),
)


@given(reports, metrics, share)
@settings(deadline=None)
def test_whatever_a_sync_reports_is_written_and_read(report, values, part):
    logged = Logged()
    with suppress(ConfigurationError):  # an unprintable name
        logged.take(values)
    each = Clipped(part, 1.0, "layer")
    report = replace(report, weights=(part,) * report.members, clipped=(each,) * report.members)
    line = line_of(report, 7, 1.8e9, live, logged.since_sync())
    data = line.to_bytes()
    assert len(data) <= LINE_BYTES
    assert SyncLine.from_bytes(data) == line
    assert read_history(data * 2).lines == (line, line)
    assert (line.sync, line.members, line.number) == (report.sync, report.members, 7)
    assert len(line.weights) == len(line.clipped) == (report.members if report.members < 65 else 0)
