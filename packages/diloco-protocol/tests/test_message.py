"""Outcomes through a few KiB and log lines: whole, or refused."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import (
    InvalidRequestError,
    Outcome,
    OutcomeMessage,
    Reason,
    ReplicaSpec,
    SpecVersionError,
    is_result_line,
    outcome_from_message,
    outcome_to_message,
    result_from_lines,
    spec_to_environment,
)
from diloco_protocol.backend import OUTCOME_BYTES
from diloco_protocol.runner import START_FAILED_CODE

LIMIT = OutcomeMessage.max_result_bytes
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=300),
    lambda inside: st.lists(inside, max_size=8)
    | st.dictionaries(st.text(max_size=9), inside, max_size=8),
    max_leaves=60,
)


@given(
    VALUES,
    st.text(max_size=9000) | st.none(),
    st.text(max_size=30000) | st.none(),
    st.lists(st.text(max_size=40)),
)
def test_whatever_goes_in_fits_and_comes_back(result, error, traceback, noise):
    outcome = Outcome(
        3, error=error, error_type="E", traceback=traceback, result=result, started_at=1.5
    )
    text, lines = outcome_to_message(outcome)
    assert len(text.encode()) <= 4096
    assert all(
        len(line) < 8192 and "\n" not in line and line.isascii() and is_result_line(line)
        for line in lines
    )
    message = outcome_from_message(text)
    found = (
        result_from_lines(message, [*noise, *reversed(lines), *noise])
        if lines
        else message.outcome.result
    )
    assert found == result
    plain = replace(message.outcome, result=None, error=None, traceback=None)
    assert plain == replace(outcome, result=None, error=None, traceback=None)
    if len(outcome.to_json()) <= 4096:
        assert (message.outcome, lines) == (outcome, [])


def test_the_ends_of_a_long_traceback_stay():
    outcome = Outcome(
        1, error="E: no such data", traceback="Traceback\n" + "x" * 9000 + "\nE: no such data"
    )
    kept = outcome_from_message(outcome_to_message(outcome)[0]).outcome
    assert kept.error == outcome.error
    assert kept.traceback.startswith("Traceback\n")
    assert kept.traceback.endswith("E: no such data")


@given(
    st.integers(512, 2000),
    st.text(max_size=3000),
    st.text(max_size=300),
    st.text(max_size=9000) | st.none(),
)
def test_smaller_channels_hold_it_too(size, error, error_type, traceback):
    outcome = Outcome(3, error=error, error_type=error_type, traceback=traceback, attempt=7)
    text, _ = outcome_to_message(outcome, size)
    assert len(text) <= size
    kept = outcome_from_message(text).outcome
    assert (kept.exit_code, kept.attempt) == (3, 7)


def test_where_there_is_little_room_the_error_stays_and_the_traceback_goes():
    outcome = Outcome(1, error="E" * 200, error_type="E", traceback="Traceback\n" + "x" * 9000)
    cut = outcome_from_message(outcome_to_message(outcome, 700)[0]).outcome
    assert (cut.error, cut.traceback[:9]) == ("E" * 200, "Traceback")
    gone = outcome_from_message(outcome_to_message(outcome, 512)[0]).outcome
    assert (gone.error, gone.traceback) == ("E" * 200, None)


def test_too_little_room_is_refused():
    with pytest.raises(InvalidRequestError, match="message_bytes must be a whole number from 512"):
        outcome_to_message(Outcome(0), 511)


def test_lost_and_damaged_lines_are_no_result():
    text, lines = outcome_to_message(Outcome(0, result="y" * 30_000, reason=Reason.COMPLETED))
    message = outcome_from_message(text)
    assert len(lines) == message.result_lines == 4
    with pytest.raises(InvalidRequestError, match="1 of the 4 log lines"):
        result_from_lines(message, lines[1:])
    with pytest.raises(InvalidRequestError, match="damaged"):
        result_from_lines(message, [*lines[:3], lines[3].replace("y", "z")])
    with pytest.raises(InvalidRequestError, match="damaged"):  # half of a surrogate pair
        result_from_lines(message, [*lines[:3], lines[3].replace("y", "\ud800")])


def test_a_result_has_a_limit():
    assert outcome_to_message(Outcome(0, result="x" * (LIMIT - 2)))[1]
    with pytest.raises(InvalidRequestError, match="1048577 bytes"):
        outcome_to_message(Outcome(0, result="x" * (LIMIT - 1)))


@pytest.mark.parametrize(
    "text",
    [
        *("", "Traceback (most recent call last)", "[1]", '{"outcome": {}, "x": 1}'),
        f'{{"outcome": {Outcome(0).to_json()}, "result_lines": "2", "result_sha256": ""}}',
        f'{{"outcome": {Outcome(0).to_json()}, "result_lines": 2, "result_sha256": null}}',
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises((InvalidRequestError, SpecVersionError)):
        outcome_from_message(text)


def changed(**fields):
    """A message with other JSON text in some fields, of it or its outcome; whole and in lines."""
    outcome = json.loads(Outcome(0, reason=Reason.COMPLETED).to_json())
    message = {"outcome": outcome, "result_lines": 0, "result_sha256": ""}
    for name in fields:
        (outcome if name in outcome else message)[name] = f"<{name}>"
    text = json.dumps(message)
    for name, value in fields.items():
        text = text.replace(f'"<{name}>"', value)
    return text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("exit_code", value) for value in ("-1", "256", "true", "0.0", "null", "9" * 4000)],
        *[(name, v) for name in ("started_at", "finished_at") for v in ("-1", "1e400", "1e12")],
        *[("finished_at", value) for value in ("true", '"1"', "[]", "NaN", "9" * 4000)],
        *[("attempt", value) for value in ("0", "-1", "true", '"1"', "null", "9" * 4000)],
        *[(name, "3") for name in ("signal", "error", "error_type", "traceback")],
        *[(name, r'"\ud800"') for name in ("signal", "error", "error_type", "traceback", "result")],
        *[("result", value) for value in ("1e400", "[" * 300 + "]" * 300)],
        *[("reason", value) for value in ('"none"', "[]", "{}", "null")],
        *[("version", value) for value in ("99", "9" * 4000, "[]", '"1"')],
        *[("result_lines", value) for value in ("-1", "1", "133", "true", '"5"', "9" * 4000)],
        *[("result_sha256", value) for value in ('"a"', "1", "[]")],
    ],
)
def test_every_field_is_looked_at(name, value):
    """Whatever a pod has put there: it is refused by name, and nothing else is raised."""
    assert outcome_from_message(changed()).outcome.reason is Reason.COMPLETED
    with pytest.raises((InvalidRequestError, SpecVersionError)) as caught:
        outcome_from_message(changed(**{name: value}))
    assert len(str(caught.value)) < 500


@given(st.recursive(VALUES | st.floats(), lambda inside: st.lists(inside), max_leaves=5), st.data())
def test_no_field_can_raise_anything_else(value, data):
    name = data.draw(
        st.sampled_from(sorted(json.loads(Outcome(0).to_json()) | {"result_lines": 0}))
    )
    with contextlib.suppress(InvalidRequestError, SpecVersionError):
        outcome_from_message(changed(**{name: json.dumps(value)}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"\\ud800"', "half of a surrogate pair"),
        ("9" * 4290, "an integer of"),
        ("[" * 250 + "]" * 250, "nested more than"),
        ("[NaN]", "not a JSON number"),
        (json.dumps("y" * (OutcomeMessage.max_result_bytes + 1)), "larger than 1048576 bytes"),
    ],
)
def test_lines_that_a_replica_has_written_itself_are_held_against_what_the_runner_writes(text, why):
    digest = hashlib.sha256(text.encode()).hexdigest()
    cut = [text[start : start + 8_000] for start in range(0, len(text), 8_000)]
    message = OutcomeMessage(Outcome(0), len(cut), digest)
    lines = [f"diloco-result {digest[:16]} {number} {piece}" for number, piece in enumerate(cut)]
    with pytest.raises(InvalidRequestError, match=why):
        result_from_lines(message, lines)


def test_lines_with_other_numbers_are_not_read():
    text, lines = outcome_to_message(Outcome(0, result="y" * 30_000, reason=Reason.COMPLETED))
    mark = lines[0].split(" ")[:2]
    odd = [" ".join([*mark, number, "z"]) for number in ("9" * 5000, "\u0662", "-1", "x", "")]
    message = outcome_from_message(text)
    assert result_from_lines(message, [*lines, *odd]) == "y" * 30_000


MODULE = """
import os

def who():
    names = ("REPLICA_RANK", "REPLICA_WORLD_SIZE", "DILOCO_ATTEMPT")
    return [os.environ[name] for name in names]

def leaves(code):
    raise SystemExit(code)

def large(size):
    print("training")
    return "x" * size
"""


def run(tmp_path, entrypoint, kwargs, *arguments):
    (tmp_path / "entry.py").write_text(MODULE)
    spec = ReplicaSpec(entrypoint, kwargs, rank=3, world_size=9)
    file = tmp_path / "termination-log"
    file.write_text("something longer than what is to come " * 200)
    inode = file.stat().st_ino
    done = subprocess.run(
        [sys.executable, "-m", "diloco_protocol.runner", "--message", str(file), *arguments],
        env={
            **os.environ,
            **spec_to_environment(spec),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        },
        capture_output=True,
        text=True,
    )
    assert file.stat().st_ino == inode  # a container's file is a mount: it cannot be replaced
    return done, outcome_from_message(file.read_text())


def test_one_template_serves_a_cohort(tmp_path):
    done, message = run(tmp_path, "entry:who", {}, "--index=4", "--failed=2", "--failed=")
    assert done.returncode == 0
    assert message.outcome.result == ["7", "9", "3"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "argument", ["--index=$(JOB_COMPLETION_INDEX)", "--index=", "--failed=-1", "--index=6"]
)
def test_a_rank_that_is_not_known_starts_nothing(tmp_path, argument):
    done, message = run(tmp_path, "entry:who", {}, argument)
    assert done.returncode == 2
    assert message.outcome.reason is Reason.START_FAILED
    assert (
        "--index" in message.outcome.error
        or "--failed" in message.outcome.error
        or "rank" in message.outcome.error
    )


@pytest.mark.parametrize(
    "line",
    [
        "diloco-result of step 3: loss 0.1",
        "diloco-result 0123456789abcdef",
        "diloco-result 0123456789abcdef three {}",
        " diloco-result 0123456789abcdef 3 {}",
    ],
)
def test_what_a_program_prints_is_no_line_of_a_result(line):
    assert is_result_line("diloco-result 0123456789abcdef 3 {}")
    assert not is_result_line(line)


def test_a_large_result_goes_to_the_log(tmp_path):
    done, message = run(tmp_path, "entry:large", {"size": 50_000})
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if not is_result_line(line)] == ["training"]
    assert result_from_lines(message, done.stdout.splitlines()) == "x" * 50_000


def test_a_result_over_the_limit_is_a_failure(tmp_path):
    done, message = run(tmp_path, "entry:large", {"size": LIMIT})
    assert done.returncode == 79
    assert (message.outcome.exit_code, message.outcome.error_type) == (79, "InvalidResult")
    assert f"{LIMIT + 2} bytes" in message.outcome.error
    assert done.stderr == ""


def test_what_the_message_says_is_not_in_the_log(tmp_path):
    done, message = run(tmp_path, "entry:leaves", {"code": 3})
    assert done.returncode == message.outcome.exit_code == 3
    assert "exited with code 3" in message.outcome.error
    assert (done.stdout, done.stderr) == ("", "")


def start(tmp_path, function, kwargs, message):
    (tmp_path / "entry.py").write_text(
        "import pathlib, shutil\n\n"
        "def mark(path):\n    pathlib.Path(path).touch()\n\n"
        "def remove(path):\n    shutil.rmtree(path)\n"
    )
    spec = ReplicaSpec(f"entry:{function}", kwargs, rank=0, world_size=1)
    return subprocess.run(
        [sys.executable, "-m", "diloco_protocol.runner", "--message", str(message)],
        env={
            **os.environ,
            **spec_to_environment(spec),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.processes
def test_a_message_that_cannot_be_written_is_no_success(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    done = start(tmp_path, "remove", {"path": str(folder)}, folder / "log")
    assert done.returncode == 1
    assert "the outcome cannot be written" in done.stderr


@pytest.mark.processes
def test_a_message_that_can_never_be_written_keeps_the_program_from_starting(tmp_path):
    """Hours of work would be lost if it were noticed at the end."""
    mark = tmp_path / "mark"
    done = start(tmp_path, "mark", {"path": str(mark)}, tmp_path / "none" / "log")
    assert done.returncode == START_FAILED_CODE
    assert "No such file or directory" in done.stderr
    assert not mark.exists()


def test_what_is_larger_than_any_message_is_not_parsed():
    with pytest.raises(InvalidRequestError, match="this message is larger than"):
        outcome_from_message("[" * (OUTCOME_BYTES + 1))
