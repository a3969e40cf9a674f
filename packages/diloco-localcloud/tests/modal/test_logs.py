"""Logs, as the client reads them."""

from __future__ import annotations

from datetime import UTC, datetime

import modal
import pytest
from modal import exception


def messages(entries):
    return [entry.message for entry in entries]


@pytest.fixture
def written(lab):
    """A call that has written five lines in five minutes."""
    lab.world.deploy("app", ["function"], timeout=3600)
    call, scripted = lab.spawn()
    scripted.start()
    for number in range(5):
        scripted.log(f"step {number}\n", "stderr" if number == 3 else "stdout")
        lab.world.advance(60)
    return call


def test_tail(lab, written):
    assert messages(written.logs.tail(2)) == ["step 3\n", "step 4\n"]
    assert messages(written.logs.tail(source="stderr")) == ["step 3\n"]
    again = modal.FunctionCall.from_id(written.object_id, client=lab.client)
    (entry,) = again.logs.tail(1)
    assert (entry.source, entry.object_id) == ("stdout", written.object_id)
    assert entry.timestamp.timestamp() == lab.world.now() - 60


def test_fetch(lab, written):
    end = datetime.fromtimestamp(lab.world.now(), UTC)
    # Half a second off the lines, since a datetime is rounded to microseconds.
    since = datetime.fromtimestamp(lab.world.now() - 180.5, UTC)
    assert messages(written.logs.fetch(since=since, until=end)) == [
        "step 2\n",
        "step 3\n",
        "step 4\n",
    ]
    assert messages(written.logs.fetch(since=since, until=end, search_text="4")) == ["step 4\n"]
    stderr = written.logs.fetch(since=since, until=end, source="stderr")
    assert messages(stderr) == ["step 3\n"]
    early = datetime.fromtimestamp(lab.world.now() - 900, UTC)
    until = datetime.fromtimestamp(lab.world.now() - 179.5, UTC)
    assert messages(written.logs.fetch(since=early, until=until))[-1] == "step 2\n"


def test_lines_of_other_calls_are_not_among_them(lab, written):
    other, scripted = lab.spawn()
    scripted.start()
    scripted.log("one\rtwo\x0bthree\nfour")
    scripted.log("preempted\n", "system")
    assert messages(other.logs.tail()) == ["one\rtwo\x0bthree\n", "four", "preempted\n"]
    scripted.log(b"\xff\n")
    assert messages(other.logs.tail(1)) == ["\ufffd\n"]
    assert messages(other.logs.tail(source="system")) == ["preempted\n"]
    assert len(messages(written.logs.tail())) == 5


def test_each_container_is_named(lab):
    call, scripted = lab.spawn()
    scripted.start()
    scripted.log("first\n")
    scripted.preempt()
    lab.world.settle()
    scripted.start()
    scripted.log("second\n")
    first, second = call.logs.tail()
    assert first.context_ids[1] != second.context_ids[1]


def test_what_of_logs_is_not_served(lab, written):
    """A log is asked for with its times; none is followed."""
    for read in (written.logs.fetch, written.logs.stream):
        with lab.refused(exception.UnimplementedError, "the stand-in does not serve"):
            list(read())
