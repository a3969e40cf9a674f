"""Logs over the scripted stand-in."""

import time

import pytest

from diloco_localcloud import ModalStandIn
from diloco_modal._client._errors import DenseLogError
from diloco_modal._verbs import _log_entries, _logs
from diloco_protocol import (
    Backoff,
    ForbiddenError,
)


def test_logs(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    assert executor.stream_logs(handle) == ""
    lab.begin(handle)
    call = lab.call(handle)
    call.log("one\n")
    lab.world.advance(1)
    call.log("tw")
    lab.world.advance(1)
    call.log("o\n")
    call.log("wrong\n", "stderr")
    call.log(
        "Runner preempted by the cloud provider\n", "system"
    )  # Modal's words, not the replica's
    assert executor.stream_logs(handle, n_lines=2) == "two\nwrong"
    assert list(executor.log_iter(handle, streams="stdout")) == ["one", "two"]
    assert list(executor.log_iter(handle, regex="w")) == ["two", "wrong"]
    lab.finish(handle)
    assert list(executor.log_iter(handle, follow=True)) == ["one", "two", "wrong"]


def test_a_line_is_not_gone_on_with_by_another_stream_or_container(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    call = lab.call(handle)
    for piece, source in (("out", "stdout"), ("err\n", "stderr"), ("put\nunfini", "stdout")):
        call.log(piece, source)
        lab.world.advance(1)
    call.preempt()
    lab.world.advance(2)
    call.start()
    call.log("shed\n")
    assert executor.stream_logs(handle).split("\n") == ["err", "output", "unfini", "shed"]


def test_a_launcher_whose_clock_is_half_a_minute_ahead_sees_the_first_lines(lab):
    executor = lab.executor(clock=lambda: lab.world.now() + 30)
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).log("first\n")
    assert list(executor.log_iter(handle)) == ["first"]


def test_a_log_that_cannot_be_read_is_shown_where_modal_has_it(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.stand_in.faults.add("forbidden", verb="AppFetchLogs", times=None)
    page = f"https://modal.com/id/{lab.call(handle).call_id}"
    with pytest.raises(ForbiddenError, match=f"which Modal shows at {page}:"):
        lab.executor().stream_logs(handle)
    assert lab.executor().describe(handle).url == page


def test_following_ends_at_its_time_and_bears_throttling(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).log("one\n")
    lab.stand_in.faults.add("throttle", verb="AppFetchLogs", times=3)
    until = lab.world.now() + 30
    assert list(executor.log_iter(handle, follow=True, until=until)) == ["one"]
    assert lab.world.now() >= until


def test_what_is_read_of_a_log_at_once_is_counted_in_bytes(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("\N{ROCKET}" * 1000)
    client, call_id = lab.executor()._client, lab.call(handle).call_id
    call, tail = client.call(call_id), lambda logs: logs.tail(1)
    assert len(client.log_entries(call_id, call, tail, 5000)) == 1
    with pytest.raises(DenseLogError):
        client.log_entries(call_id, call, tail, 3000)


def test_the_last_line_of_many_pieces(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    for piece in ("first\n", "a", "b", "c", "d", "e\n"):
        lab.call(handle).log(piece)
        lab.world.advance(1)
    assert executor.stream_logs(handle, n_lines=1) == "abcde"


def test_the_last_line_of_more_pieces_than_the_client_gives(lab, monkeypatch):
    """As of a progress bar, which writes many steps into one line."""
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("first\n")
    for step in range(40):
        lab.call(handle).log(f"\r{step}", "stderr")
        lab.world.advance(1)
    monkeypatch.setattr(_logs, "_MOST_ENTRIES", 20)
    steps = "".join(f"\r{step}" for step in range(40))
    assert lab.executor().stream_logs(handle, n_lines=1) == steps
    assert lab.executor().stream_logs(handle, n_lines=100) == f"first\n{steps}"


@pytest.mark.parametrize("behind", [600, -600], ids=["behind", "ahead"])
def test_logs_where_clocks_differ(lab, behind):
    with ModalStandIn(start=time.time() + behind) as stand_in:
        lab = type(lab)(stand_in)
        executor = lab.executor(clock=time.time)
        (handle,) = lab.launch(1, executor)
        lab.begin(handle)
        lab.call(handle).log("a line\n")
        assert list(executor.log_iter(handle)) == ["a line"]
        lab.client.__exit__(None, None, None)


def test_a_line_that_a_container_did_not_finish_ends_with_it(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("first\nunfini")
    lab.call(handle).preempt()
    lab.world.advance(40)
    lab.call(handle).start()
    lab.call(handle).log("shed\nsecond\n")
    lines = ["first", "unfini", "shed", "second"]
    assert lab.executor().stream_logs(handle).split("\n") == lines
    assert list(lab.executor().log_iter(handle)) == lines


def test_what_arrives_after_the_end_is_followed_too(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("early\n")
    lab.finish(handle)
    pieces = ["", "l", "ate"]

    def sleep(seconds):
        lab.world.advance(seconds)
        if pieces and (piece := pieces.pop(0)):
            lab.call(handle).log(piece)

    executor = lab.executor(backoff=Backoff(clock=lab.world.now, sleep=sleep))
    assert list(executor.log_iter(handle, follow=True)) == ["early", "late"]


def test_a_log_is_followed_until_a_time_to_come(lab):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    lab.call(handle).log("in time\n")
    lines = lab.executor().log_iter(handle, follow=True, until=lab.world.now() + 20)
    assert list(lines) == ["in time"]
    assert lab.executor().poll(handle) == "running"


def test_of_a_dense_stretch_no_more_is_read_than_may_be_held(lab, monkeypatch):
    """Modal's client would read it at once; it is read in parts, as the requests show."""
    (handle,) = lab.launch(1)
    lab.begin(handle)
    for number in range(200):
        lab.call(handle).log(f"{number}\n")
        lab.world.advance(1)
    monkeypatch.setattr(_log_entries, "MOST_BYTES", 5000)
    lines = lab.executor().log_iter(handle)
    assert next(lines) == "0"
    before = len(lab.stand_in.calls.requests())
    assert list(lines) == [str(number) for number in range(1, 200)]
    verbs = [call.verb for call in lab.stand_in.calls.requests()[before:]]
    assert verbs.count("AppFetchLogs") > 5


def test_what_is_too_much_at_one_time_is_named_and_the_rest_is_read(lab, monkeypatch):
    monkeypatch.setattr(_log_entries, "MOST_BYTES", 1000)
    (handle,) = lab.launch(1)
    lab.begin(handle)
    for text, count in (("before\n", 1), ("dense\n", 30), ("after\n", 1)):
        for _ in range(count):
            lab.call(handle).log(text)
        lab.world.advance(0.01)
    first, gap, last = lab.executor().log_iter(handle)
    assert (first, last) == ("before", "after")
    assert "than can be read: lines are missing here" in gap
    assert lab.executor().stream_logs(handle, n_lines=3).split("\n") == ["dense", "dense", "after"]


@pytest.mark.sampled
@pytest.mark.parametrize("far", [1e300, 1e17, 1e12, 1e11])
def test_times_that_no_clock_shows(lab, far):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.call(handle).log("one\n")
    lab.world.advance(1)
    assert list(executor.log_iter(handle, until=far)) == ["one"]
    assert list(executor.log_iter(handle, since=-far, until=far)) == ["one"]
    assert list(executor.log_iter(handle, since=far)) == []
    assert list(executor.log_iter(handle, until=-far)) == []
    lab.finish(handle)
    assert list(executor.log_iter(handle, until=far, follow=True)) == ["one"]
    assert list(executor.log_iter(handle, since=far, follow=True)) == []
