"""A log is followed until its replica has ended and nothing more comes."""

import pytest

from diloco_protocol import Backoff, LogQuery
from diloco_protocol.backend import LogEnd, Look, follow


class Log:
    """A log whose lines arrive at given times, of a replica that ends at a given time."""

    def __init__(self, arrivals, ends_at):
        self.arrivals, self.ends_at, self.now, self.looks = arrivals, ends_at, 0.0, []
        self.read_until = -1.0

    def sleep(self, seconds):
        self.now += seconds

    def read(self, last):
        self.looks.append((self.now, last))
        fresh = [line for at, line in self.arrivals if self.read_until < at <= self.now]
        self.read_until = self.now
        yield from fresh
        return Look(bool(fresh))

    def lines(self, end=None, **query):
        backoff = Backoff(
            first=1.0, factor=2.0, cap=8.0, jitter=0.0, clock=lambda: self.now, sleep=self.sleep
        )
        ended = lambda: self.now >= self.ends_at  # noqa: E731
        return follow(LogQuery(**query), self.read, ended, backoff, lambda: self.now, end)


def test_without_follow_there_is_one_look():
    log = Log([(0.0, "a"), (1.0, "b")], ends_at=100.0)
    assert list(log.lines()) == ["a"]
    assert log.looks == [(0.0, True)]


def test_lines_of_the_last_look_are_given_and_no_look_follows():
    log = Log([(0.0, "a"), (3.0, "b")], ends_at=3.0)
    assert list(log.lines(follow=True)) == ["a", "b"]
    assert log.looks == [(0.0, False), (1.0, False), (3.0, True)]


def test_pauses_begin_anew_when_something_comes():
    log = Log([(7.0, "a")], ends_at=11.0)
    assert list(log.lines(follow=True)) == ["a"]
    assert [at for at, _ in log.looks] == [0.0, 1.0, 3.0, 7.0, 8.0, 10.0, 14.0]


def test_pauses_begin_anew_at_the_end():
    log = Log([], ends_at=7.0)
    assert list(log.lines(LogEnd(looks=3), follow=True)) == []
    assert [at for at, _ in log.looks] == [0.0, 1.0, 3.0, 7.0, 8.0, 10.0]


def test_it_ends_at_a_time():
    log = Log([(0.0, "a"), (20.0, "b")], ends_at=100.0)
    assert list(log.lines(follow=True, until=5.0)) == ["a"]
    assert log.looks[-1] == (7.0, True)


@pytest.mark.parametrize(
    ("end", "lines"),
    [
        (None, ["a"]),
        (LogEnd(looks=1), ["a", "b"]),
        (LogEnd(looks=2), ["a", "b"]),
        (LogEnd(looks=3), ["a", "b", "c"]),
        (LogEnd(seconds=0.9), ["a"]),
        (LogEnd(seconds=1.0), ["a", "b"]),
        (LogEnd(seconds=5.0), ["a", "b", "c"]),
    ],
)
def test_late_lines_are_waited_for(end, lines):
    log = Log([(0.0, "a"), (1.0, "b"), (5.5, "c")], ends_at=0.0)
    assert list(log.lines(end, follow=True)) == lines


def test_a_look_that_was_broken_off_is_followed_by_another_at_once():
    log, looks = Log([], ends_at=0.0), [("a", False), ("b", False), ("c", True)]

    def read(_):
        line, whole = looks.pop(0)
        yield line
        return Look(fresh=True, whole=whole)

    log.read = read
    assert list(log.lines()) == ["a", "b", "c"]
    assert (log.now, looks) == (0.0, [])


def test_a_query_selects_by_time_and_text():
    query = LogQuery(since=1.0, until=3.0, regex="^b")
    assert query.selects("b", 1.0)
    assert query.selects("b")
    assert not query.selects("ab", 1.0)
    assert not query.selects("b", 0.9)
    assert not query.selects("b", 3.0)
