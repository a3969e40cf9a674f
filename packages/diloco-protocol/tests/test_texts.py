"""Texts for people hold nothing that a terminal obeys; logs are raw."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_lab import DONE, Memory

from diloco_protocol import FolderJournal, Reason, ReplicaState, ReplicaStatus, ResultLostError
from diloco_protocol._texts import readable

#: Erases the screen, and ends a line in the eyes of some.
BAD = "one\x1b[2J\rtwo\x00\x85\u2028\u202ethree"
GOOD = r"one\x1b[2J\rtwo\x00\x85\u2028\u202ethree"


@given(st.text() | st.text(st.characters(max_codepoint=0xA0)))
def test_what_is_readable_stays_so(text):
    once = readable(text)
    assert readable(once) == once
    assert all(c.isprintable() or c in "\n\t" for c in once if c < "\xa0")
    if text.isprintable():
        assert once == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb\tc", "a\nb\tc"), ("a\r\nb", "a\nb"), ("a\rb", r"a\rb"), ("é 雪 🙂", "é 雪 🙂"),
     (BAD, GOOD)],
)  # fmt: skip
def test_texts(text, shown):
    assert readable(text) == shown


FAILED = ReplicaStatus(
    ReplicaState.FAILED, reason=Reason.ERROR, exit_code=1, signal=BAD, message=BAD, native=BAD,
    url=BAD
)  # fmt: skip


@pytest.mark.parametrize("journaled", [False, True])
def test_no_verb_hands_on_what_a_terminal_obeys(tmp_path, journaled):
    executor = Memory({}, journal=FolderJournal(tmp_path) if journaled else None)
    (handle,) = executor.launch_replicas(1, "m:f")
    # The journal takes nothing but the name of a signal.
    failed = replace(FAILED, signal="SIGKILL" if journaled else BAD)
    signal = "SIGKILL" if journaled else GOOD
    executor.world[handle] = failed
    seen = []
    for _ in range(2):  # the second time, the journal answers
        status = executor.describe(handle)
        assert status == replace(failed, message=GOOD, signal=signal, native=GOOD, url=GOOD)
        (result,) = executor.collect([handle], progress=lambda known: seen.extend(known.values()))
        assert (result["error"], result["signal"]) == (GOOD, signal)
    assert {status.message for status in seen} == {GOOD}


def test_an_end_that_was_recorded_as_it_was(tmp_path):
    journal = FolderJournal(tmp_path)
    executor = Memory({}, journal=journal)
    (handle,) = executor.launch_replicas(1, "m:f")
    journal.record_end(handle, replace(FAILED, signal=None), None)
    assert executor.describe(handle).message == GOOD


@pytest.mark.parametrize("journaled", [False, True])
def test_no_end_is_before_its_start(tmp_path, journaled):
    journal = FolderJournal(tmp_path)
    executor = Memory({}, journal=journal if journaled else None)
    (handle,) = executor.launch_replicas(1, "m:f")
    # A clock that was set back, or that of another machine.
    status = replace(DONE, started_at=20.0, finished_at=10.0)
    if journaled:
        journal.record_end(handle, status, None)
    executor.world[handle] = status
    assert executor.describe(handle) == replace(status, finished_at=20.0)


def test_why_a_result_is_lost():
    executor = Memory({})
    (handle,) = executor.launch_replicas(1, "m:f")
    executor.world[handle] = DONE

    def lost(handle):
        raise ResultLostError(BAD)

    executor._result = lost
    (result,) = executor.collect([handle])
    assert result["error"] == f"the result is lost: {GOOD}"
