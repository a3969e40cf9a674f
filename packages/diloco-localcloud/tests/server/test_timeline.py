"""One queue on a clock that only its owner moves."""

from __future__ import annotations

from diloco_localcloud._server._timeline import Timeline, seconds, stamp


def test_things_run_when_they_are_due_in_the_order_given():
    timeline, ran = Timeline(100.0), []
    for name, after in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("now", -5.0)):
        timeline.after(after, lambda name=name: ran.append((name, timeline.now())))
    timeline.run_until(101.5)
    assert ran == [("now", 100.0), ("a", 101.0), ("b", 101.0)]
    assert (timeline.now(), timeline.next_due()) == (101.5, 102.0)
    assert timeline.step()
    assert not timeline.step()
    assert timeline.next_due() is None


def test_a_stamp_is_read_back():
    assert stamp(1767225600.9) == "2026-01-01T00:00:00Z"
    assert seconds(stamp(1767225600.9)) == 1767225600.0
