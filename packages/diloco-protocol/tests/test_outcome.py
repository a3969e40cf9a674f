"""An outcome comes back exactly as it went in, or is refused: whoever wrote it."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import json_values, odd_values, text

from diloco_protocol import InvalidRequestError, Outcome, Reason, SpecVersionError
from diloco_protocol._fields import LARGEST, LATEST, TEXT_CHARACTERS
from diloco_protocol._outcome import REPORTED
from diloco_protocol.backend import OUTCOME_BYTES, RESULT_BYTES

REFUSED = (InvalidRequestError, SpecVersionError)

times = st.none() | st.floats(0, LATEST) | st.integers(0, LATEST)
texts = st.none() | text
common = {
    "error": texts,
    "error_type": texts,
    "traceback": texts,
    "result": json_values,
    "started_at": times,
    "finished_at": times,
    "attempt": st.integers(1, LARGEST),
}
outcomes = st.builds(Outcome, st.just(0), **common) | st.builds(
    Outcome,
    st.integers(1, 255),
    signal=st.none() | st.sampled_from(["SIGKILL", "SIGINFO", "SIGSTKFLT", "signal 40"]),
    reason=st.sampled_from(sorted(REPORTED - {Reason.COMPLETED})),
    **common,
)


def exactly(a, b):
    """Equal, and of the same types all the way down (1 is not 1.0 and not True)."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@given(outcomes)
def test_what_is_written_can_be_read(outcome):
    again = Outcome.from_json(outcome.to_json())
    assert again == outcome
    assert type(again.reason) is Reason
    assert exactly(again.result, outcome.result)


fields = {
    "exit_code": st.integers(-300, 5000) | st.sampled_from([2**40, 10**400]),
    "signal": st.sampled_from(["", "5", "SIGKILL", "SIGNOPE", "SIGKILL ", "signal 0", "signal 9x"]),
    "attempt": st.integers(-2, 2) | st.sampled_from([LARGEST, LARGEST + 1, 2**40]),
    "reason": st.sampled_from([None, *Reason]),
    "started_at": st.floats() | st.sampled_from([-1, LATEST, LATEST + 1, 10**400, 1e15]),
    "version": st.sampled_from([1, 2, 2.0, 3, True, "2", None]),
    "error": st.text() | st.just("x" * (TEXT_CHARACTERS + 1)),
}
changes = st.sampled_from(sorted(fields)).flatmap(
    lambda name: st.tuples(st.just(name), fields[name] | odd_values)
)


@given(outcomes, changes)
def test_a_changed_field_is_refused_or_comes_back(outcome, change):
    """What a stranger writes: nothing else is raised, and what is taken can be written again."""
    name, value = change
    data = {**json.loads(outcome.to_json()), name: value}
    with contextlib.suppress(*REFUSED):
        read = Outcome.from_json(json.dumps(data))
        assert Outcome.from_json(read.to_json()) == read


@given(outcomes, changes)
def test_what_the_writer_takes_the_reader_takes(outcome, change):
    name, value = change
    made = {f: getattr(outcome, f) for f in Outcome.__slots__} | {name: value}
    try:
        written = Outcome(**made).to_json()
    except REFUSED:
        return
    assert Outcome.from_json(Outcome.from_json(written).to_json()).to_json() == written


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"version": 9}', '{"version": 1}'])
def test_what_is_no_outcome_is_refused(data):
    with pytest.raises(REFUSED):
        Outcome.from_json(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("exit_code", value) for value in ("1", True, None, -1, 256, 4242)],
        *[("signal", value) for value in (9, "5", "SIG", "SIGNOPE", "signal 0", "signal 128")],
        *[("attempt", value) for value in (0, 2**31, 2**40)],
        *[(name, v) for name in ("started_at", "finished_at") for v in ("0", -1, 1e15)],
        *[("error", value) for value in ([], "x" * (TEXT_CHARACTERS + 1))],
        ("version", 2.0),
    ],
)
def test_a_field_that_no_runner_writes_is_refused_by_name(field, value):
    data = {**json.loads(Outcome(1).to_json()), field: value}
    with pytest.raises(REFUSED, match=f"(this outcome has|the) {field}"):
        Outcome.from_json(json.dumps(data))


@pytest.mark.parametrize("reason", sorted(set(Reason) - REPORTED))
def test_a_reason_that_needs_the_platforms_evidence_is_no_report(reason):
    data = {**json.loads(Outcome(1).to_json()), "reason": reason}
    with pytest.raises(
        InvalidRequestError, match=f"the reason '{reason}', and a replica reports only"
    ):
        Outcome.from_json(json.dumps(data))
    with pytest.raises(
        InvalidRequestError, match=f"the reason '{reason}', and a replica reports only"
    ):
        Outcome(1, reason=reason).to_json()


@pytest.mark.parametrize(
    ("code", "reason", "signal"),
    [(0, "error", None), (1, "completed", None), (0, "completed", "SIGKILL"), (0, "timeout", None)],
)
def test_a_success_is_the_exit_code_0_and_completed(code, reason, signal):
    fields = {"exit_code": code, "reason": reason, "signal": signal}
    data = {**json.loads(Outcome(1).to_json()), **fields}
    with pytest.raises(
        InvalidRequestError, match="a success, and nothing else, has the exit code 0"
    ):
        Outcome.from_json(json.dumps(data))
    with pytest.raises(
        InvalidRequestError, match="a success, and nothing else, has the exit code 0"
    ):
        Outcome(code, reason=Reason(reason), signal=signal).to_json()


def test_the_reason_follows_from_the_exit_code():
    assert (Outcome(0).reason, Outcome(3).reason) == (Reason.COMPLETED, Reason.ERROR)


def test_a_reason_of_the_future_is_refused():
    text = Outcome(1).to_json().replace('"reason":"error"', '"reason":"bored"')
    with pytest.raises(InvalidRequestError, match="unknown reason 'bored'") as caught:
        Outcome.from_json(text)
    assert caught.value.__context__ is None  # it would have the whole reason, however long


def test_a_result_that_is_not_json_is_refused():
    with pytest.raises(InvalidRequestError, match=r"result\[1\] is a builtins\.tuple"):
        Outcome(0, result=[1, (2,)]).to_json()


def test_halves_of_surrogate_pairs_in_texts_are_escaped():
    """An exception may quote the name of a file; its message must not be lost for that."""
    said = Outcome(1, error="no file \udcff", error_type="\ud800", traceback="at \udc80")
    read = Outcome.from_json(said.to_json())
    assert (read.error, read.error_type, read.traceback) == (
        "no file \\udcff",
        "\\ud800",
        "at \\udc80",
    )


@pytest.mark.parametrize("name", sorted({*Outcome.__slots__} - {"version"}))
def test_an_outcome_has_all_of_its_fields_and_no_other(name):
    data = json.loads(Outcome(0).to_json())
    value = data.pop(name)
    for wrong in (data, {**data, name: value, "more": 1}, {**data, f"{name}s": value}):
        with pytest.raises(InvalidRequestError, match="this outcome has the fields"):
            Outcome.from_json(json.dumps(wrong))


def test_of_a_very_long_text_both_ends_are_written():
    read = Outcome.from_json(Outcome(1, error="begin" + "x" * 10**6 + "end").to_json())
    assert len(read.error) <= TEXT_CHARACTERS
    assert read.error.startswith("begin")
    assert read.error.endswith("end")


def test_the_largest_result_is_carried_and_a_larger_one_refused_by_both():
    largest = Outcome(0, result="x" * (RESULT_BYTES - 2))
    written = largest.to_json()
    assert len(written) < OUTCOME_BYTES
    assert Outcome.from_json(written) == largest
    with pytest.raises(InvalidRequestError, match=f"is {RESULT_BYTES + 1} bytes of JSON"):
        Outcome(0, result="x" * (RESULT_BYTES - 1)).to_json()
    with pytest.raises(InvalidRequestError, match=f"is {RESULT_BYTES + 1} bytes of JSON"):
        Outcome.from_json(written.replace('"result":"x', '"result":"xx'))


def test_what_is_larger_than_any_outcome_is_not_parsed():
    with pytest.raises(InvalidRequestError, match="this outcome is larger than"):
        Outcome.from_json("[" * (OUTCOME_BYTES + 1))
