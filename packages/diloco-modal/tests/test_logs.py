"""Logs that arrive late, in pieces, in great numbers: nothing is lost, and nothing comes twice."""

import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_modal._client._errors import DenseLogError
from diloco_modal._verbs import _log_entries, _logs
from diloco_modal._verbs._log_entries import Entries
from diloco_modal._verbs._logs import Lines, read_log
from diloco_protocol import Backoff, LogQuery

START = 1_700_000_000.0


def entry(at, message, source="stdout", container="ta-1"):
    moment = datetime.fromtimestamp(at, UTC)
    ids = ["in-1", container] if container else []
    return SimpleNamespace(message=message, timestamp=moment, source=source, context_ids=ids)


class Log:
    """A log of Modal whose entries arrive at times of their own, and its client."""

    def __init__(self, arrivals, *, most=None):
        self.arrivals = sorted(arrivals, key=lambda each: each[1].timestamp)  # (when, entry)
        self.times = [each.timestamp for _, each in self.arrivals]
        self.most, self.now, self.read, self.looks, self.held = most, START, 0, 0, 0

        self.last = max((when for when, _ in self.arrivals), default=START)

    def sleep(self, seconds):
        self.now += seconds

    def fetch(self, *, since, until, source):
        begin, end = bisect_left(self.times, since), bisect_right(self.times, until)
        found = [
            each
            for when, each in self.arrivals[begin:end]
            if when <= self.now and source in (None, each.source)
        ]
        if self.most is not None and len(found) > self.most:
            raise DenseLogError("too many")
        self.read, self.looks = self.read + len(found), self.looks + 1
        return found

    def tail(self, count, *, source):
        """Up to the time of the client's own clock."""
        found = self.fetch(
            since=datetime.fromtimestamp(0, UTC),
            until=datetime.fromtimestamp(self.now, UTC),
            source=source,
        )
        return found[-count:]

    def bounded(self, ask, most):
        found = list(ask(self))
        if sum(len(each.message) for each in found) > most:
            raise DenseLogError("too many bytes")
        self.held = max(self.held, len(found))
        return found

    def lines(self, **query):
        backoff = Backoff(
            first=1.0,
            factor=1.5,
            cap=20.0,
            jitter=0.0,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        asked = LogQuery(**query)
        ended = lambda: self.now > self.last - self.slack  # noqa: E731
        return read_log(self.bounded, asked, ended, self.clock, backoff, START)

    slack = 0.0
    skew = 0.0

    def clock(self):
        return self.now + self.skew


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 600),
        st.one_of(st.just(0.0), st.floats(0, 100), st.floats(0, 7200)),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["stdout", "stderr", "system"]),
        st.sampled_from(["ta-1", "ta-2", ""]),
    ),
    max_size=40,
)


@given(ARRIVALS)
def test_whatever_arrives_when_is_followed_once(told):
    """The same text at the same time, too, and lines hours older; not Modal's own words."""
    log = Log(
        (START + when, entry(START + when - late, f"{text}\n", source, container))
        for when, late, text, source, container in told
        if when - late >= -3000  # nothing is as old as an hour before the launch
    )
    written = Counter(each.message[:-1] for _, each in log.arrivals if each.source != "system")
    assert Counter(log.lines(follow=True)) == written
    assert Counter(log.lines()) == written


@given(ARRIVALS)
def test_what_is_at_most_half_a_minute_late_does_not_wait_for_the_end(told):
    log = Log(
        (START + when, entry(START + when - min(late, 29.0), f"{number}\n"))
        for number, (when, late, *_) in enumerate(told)
    )
    for line in log.lines(follow=True):
        (when,) = [when for when, each in log.arrivals if each.message == f"{line}\n"]
        assert log.now - when <= 21.0


@given(st.lists(st.tuples(st.sampled_from(["x", "y\n", "\n", "é\r", "z\nw"]), st.integers(0, 30))))
def test_what_is_followed_is_what_is_read_later(pieces):
    """In pieces that are no lines, at distances that looks fall between."""
    at, arrivals = START, []
    for text, pause in pieces:
        at += pause + 0.001
        arrivals.append((at, entry(at, text)))
    log = Log(arrivals)
    written = "".join(text for text, _ in pieces)
    followed = list(log.lines(follow=True))
    assert followed == list(log.lines())
    assert "\n".join(followed) == written.removesuffix("\n")


def test_a_look_reads_no_more_of_a_long_log_than_of_a_short_one():
    """A line every five seconds for an hour: read in looks of half a minute, and at the end."""
    count = 720
    log = Log((START + 5 * n, entry(START + 5 * n, f"{n}\n")) for n in range(count))
    assert list(log.lines(follow=True)) == [str(n) for n in range(count)]
    assert log.looks > count
    assert log.read <= 8 * log.looks + count


def test_a_container_whose_clock_is_ahead_does_not_hide_the_next_one():
    log = Log(
        [
            (START, entry(START + 900, "ahead\n")),
            *(
                (START + second, entry(START + second, f"{second}\n", container="ta-2"))
                for second in range(30, 600, 30)
            ),
        ]
    )
    for line in log.lines(follow=True):
        assert line == "ahead" or log.now - START - int(line) <= 21


def test_a_clock_that_is_set_back_leaves_nothing_out():
    log = Log((START + n, entry(START + n, f"{n}\n")) for n in range(0, 300, 10))
    lines = log.lines(follow=True)
    assert next(lines) == "0"
    log.skew = -86_400.0
    assert list(lines) == [str(n) for n in range(10, 300, 10)]


def test_what_arrives_after_the_end_is_waited_for():
    log = Log([(START, entry(START, "early\n")), (START + 3, entry(START, "late\n"))])
    log.slack = 4.0
    assert list(log.lines(follow=True)) == ["early", "late"]


def test_what_was_written_before_the_time_and_arrives_after_it_is_waited_for():
    log = Log(
        [
            (START + 1, entry(START, "early\n")),
            (START + 13, entry(START + 9, "late\n")),
            (START + 13, entry(START + 10, "later\n")),
            (START + 1000, entry(START + 1000, "end\n")),
        ]
    )
    assert list(log.lines(follow=True, until=START + 10)) == ["early", "late"]
    assert log.now < START + 30


@pytest.mark.sampled
@pytest.mark.parametrize("query", [{}, {"n_lines": 5000}, {"follow": True}])
def test_more_than_the_client_reads_at_once_is_read_in_parts(query, monkeypatch):
    monkeypatch.setattr(_logs, "_MOST_ENTRIES", 50)
    log = Log(((START, entry(START + n / 10, f"{n}\n")) for n in range(4000)), most=100)
    assert list(log.lines(**query)) == [str(n) for n in range(4000)]


def test_what_was_too_much_is_not_held_while_its_parts_are_read():
    class Part(list):
        __hash__ = object.__hash__  # so that it can be known without being held

    held, most = weakref.WeakSet(), []

    def fetch(ask, _):
        most.append(len(held))
        part = Part(ask(log))
        held.add(part)
        if len(part) > 100:
            raise DenseLogError("too many")
        return part

    log = Log((START, entry(START + n, f"{n}\n")) for n in range(2000))
    parts = Entries(fetch, None, START - 10, log.clock).new()
    assert sum(len(part) for part in parts) == 2000
    assert max(most) <= 1


def test_what_is_dense_is_read_in_parts_of_fractions_of_a_second():
    log = Log(((START, entry(START + n / 1000, f"{n}\n")) for n in range(3000)), most=300)
    assert list(log.lines()) == [str(n) for n in range(3000)]


MISSING = "[... more was printed at 22:13:21 UTC than can be read: lines are missing here ...]"


@pytest.mark.parametrize("query", [{}, {"follow": True}, {"since": START + 1.5}])
def test_too_much_at_one_time_is_a_gap_that_is_told_once(query):
    """What is some milliseconds apart is read, before it and after it."""
    times = [START + 1.6] * 11 + [START + 1.7 + n * 1e-3 for n in range(50)]
    arrivals = [(START, entry(at, f"{n}\n")) for n, at in enumerate([*times, START + 1.8])]
    log = Log([*arrivals, *[(START, entry(START + 1.9, "x\n"))] * 11], most=10)
    assert list(log.lines(**query)) == [MISSING, *map(str, range(11, 62))]


def test_the_last_lines_of_too_much_at_one_time(monkeypatch):
    monkeypatch.setattr(_logs, "_MOST_ENTRIES", 10)
    log = Log(((START, entry(START + 1, f"{n}\n")) for n in range(11)), most=10)
    log.tail = lambda count, *, source: [each for _, each in log.arrivals][-count:]
    log.most = 6
    assert list(log.lines(n_lines=3)) == ["8", "9", "10"]
    assert list(log.lines(n_lines=9)) == [str(n) for n in range(2, 11)]


def test_a_client_that_refuses_parts_of_a_moment_as_well_is_not_asked_for_ever():
    log = Log([(START, entry(START + 1, "x\n"))] * 11)
    asked = []

    def fetch(*, since, until, source):
        asked.append(since)
        raise DenseLogError("too many")

    log.fetch = fetch
    parts = Entries(log.bounded, None, START + 1, lambda: START + 1).new(START + 1.05)
    assert [each.message for part in parts for each in part] == [f"{MISSING}\n"]
    assert len(asked) < 250


@pytest.mark.parametrize("skew", [-1000, 1000])
def test_the_last_lines_where_clocks_differ(skew):
    """The client asks for what is older than its own clock."""
    log = Log((START, entry(START + second, f"{second}\n")) for second in range(0, 2000, 100))
    log.now, log.skew = START + 1000 + skew, 0.0
    assert list(log.lines(n_lines=3)) == ["1700", "1800", "1900"]
    assert list(log.lines(n_lines=100)) == [str(second) for second in range(0, 2000, 100)]


def test_the_last_of_many_lines_at_one_time():
    log = Log((START, entry(START, f"{n}\n")) for n in range(1200))
    for count in (1, 200, 1199, 1200, 1201):
        assert list(log.lines(n_lines=count)) == [str(n) for n in range(1200)][-count:]


def test_an_entry_that_was_given_is_known_again_as_often_as_it_was_there():
    log = Log([(START, entry(START, "x\n"))] * 3 + [(START + 1, entry(START, "x\n"))])
    entries = Entries(log.bounded, None, START - 10, log.clock)
    assert [sum(map(len, entries.new())) for _ in range(2)] == [3, 0]
    log.now += 1
    assert [sum(map(len, entries.new())) for _ in range(2)] == [1, 0]


def test_modals_own_words_are_no_lines_and_end_none():
    lines = Lines()
    assert [
        *lines.feed([entry(START, "beg")]),
        *lines.feed([entry(START, "Runner preempted\n", "system", "ta-2")]),
        *lines.feed([entry(START, "un\n")]),
        *lines.rest(),
    ] == ["begun"]


def test_modals_own_words_are_no_part_of_the_last_lines():
    log = Log(
        (START, entry(START + n, f"{n}\n", "system" if n % 10 else "stdout")) for n in range(100)
    )
    assert list(log.lines(n_lines=3)) == ["70", "80", "90"]


def test_a_log_with_nothing_but_modals_own_words_is_followed_at_the_usual_pace_and_not_for_ever():
    """They go on for an hour after the end."""
    log = Log((START + n, entry(START + n, "scheduled\n", "system")) for n in range(7200))
    log.last = START + 3600
    assert list(log.lines(follow=True)) == []
    assert log.now < START + 3700
    assert log.looks < 3600 / 15


def test_a_long_log_is_not_held_as_a_whole(monkeypatch):
    """And its first line is there when a small part of it was read."""
    count = 20_000
    log = Log((START + n / 10, entry(START + n / 10, f"{n} {'x' * 90}\n")) for n in range(count))
    log.now = START + count
    monkeypatch.setattr(_log_entries, "MOST_BYTES", 50_000)
    lines = log.lines()
    first = next(lines)
    assert first.startswith("0 ")
    assert log.held <= 500
    assert [first.split()[0], *(line.split()[0] for line in lines)] == [
        str(n) for n in range(count)
    ]
    assert log.held <= 500
    assert [line.split()[0] for line in log.lines(n_lines=600)] == [
        str(n) for n in range(count - 600, count)
    ]


def test_too_much_at_one_time_does_not_fill_memory(monkeypatch):
    log = Log((START, entry(START + 1, "x" * 100)) for _ in range(100))
    monkeypatch.setattr(_log_entries, "MOST_BYTES", 2000)
    (line,) = log.lines()
    assert line.endswith("lines are missing here ...]")
    assert not log.held


def test_a_line_without_an_end_is_cut():
    log = Log((START + n, entry(START + n, "x" * 100_000)) for n in range(100))
    log.now = START + 100
    (line,) = log.lines()
    assert len(line) < 1.1 * 2**20
    assert line.endswith("the line was cut here, after 1 MiB ...]")
