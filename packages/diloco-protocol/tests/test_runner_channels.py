"""The runner's other channels: a spec among strings, messages of failures, attempts in a file."""

import json
import os
import signal
import sys

import pytest
from runner_lab import MODULE, PATIENCE, begin, end, read_pid, stop

from diloco_protocol import (
    Reason,
    ReplicaSpec,
    outcome_from_message,
    spec_to_environment,
)
from diloco_protocol.backend import variables_to_strings

pytestmark = pytest.mark.processes

MORE = """
def fails_until(folder, attempt):
    seen = int(os.environ["DILOCO_ATTEMPT"])
    with open(f"{folder}/attempt-{seen}", "w") as file:
        file.write(os.environ.get("DILOCO_LAST_ATTEMPT", "not the last"))
    if seen < attempt:
        raise ValueError(f"attempt {seen} fails")
    return seen

def slow_at_first(folder):
    mark = f"{folder}/attempt-{os.environ['DILOCO_ATTEMPT']}"
    open(mark + ".new", "w").write(str(os.getpid()))
    os.rename(mark + ".new", mark)
    if os.environ["DILOCO_ATTEMPT"] == "1":
        time.sleep(600)
    return "done"

def variables(names):
    return {name: os.environ.get(name) for name in names}

def wordy():
    raise ValueError("é\\n" * 9000)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a runner whose spec is among strings, as a cloud's hyperparameters are."""
    (tmp_path / "entry.py").write_text(MODULE + MORE)
    started = []

    def start(function, kwargs=None, *options, spec=None, strings=None, **fields):
        spec = spec or ReplicaSpec(f"entry:{function}", kwargs or {}, 1, 2, grace=0.3, **fields)
        variables = spec_to_environment(spec, piece_bytes=200)
        text = {**variables, "fingerprint": "abc", "ranks": "2"} if strings is None else strings
        (tmp_path / "hyperparameters.json").write_text(json.dumps(text))
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        command = [sys.executable, "-m", "diloco_protocol.runner"]
        command += ["--spec-strings", str(tmp_path / "hyperparameters.json")]
        command += ["--outcome", str(tmp_path / "outcome.json")]
        command += ["--failure", str(tmp_path / "failure"), *options]
        started.append(begin(command, {**os.environ, "PYTHONPATH": path}, tmp_path))
        return started[-1]

    yield start
    for runner in started:
        stop(runner)


def failure(tmp_path):
    return outcome_from_message((tmp_path / "failure").read_text()).outcome


class TestStrings:
    def test_a_spec_among_other_strings_arrives_exactly(self, start, tmp_path):
        kwargs = {"a": [1, 1.0, None, {"b": "$(X) é\n'\""}], "long": "x" * 1000}
        outcome = end(start("returns", kwargs), tmp_path)
        assert json.dumps(outcome.result) == json.dumps(kwargs)

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("strings", "told"),
        [
            ({}, "no replica spec"),
            ({"DILOCO_SPEC_1": "eA=="}, "lacks DILOCO_SPEC_0"),
            (["DILOCO_SPEC_0"], "not a JSON object of text"),
            ({"DILOCO_SPEC_0": 7}, "not a JSON object of text"),
        ],
    )
    def test_what_is_no_spec_is_named(self, start, tmp_path, strings, told):
        runner = start("returns", strings=strings)
        outcome = end(runner, tmp_path)
        assert outcome.reason is Reason.START_FAILED
        assert told in outcome.error
        assert told in runner.err
        assert failure(tmp_path) == outcome

    def test_long_variables_among_the_strings_are_set(self, start, tmp_path):
        variables = {"LONG": "x" * 5000, "PLAIN": "é $HOME"}
        spec = ReplicaSpec("entry:variables", {"names": sorted(variables)}, 1, 2, grace=0.3)
        strings = spec_to_environment(spec) | variables_to_strings(variables, piece_bytes=2500)
        assert end(start("variables", strings=strings), tmp_path).result == variables

    def test_damaged_variables_start_nothing(self, start, tmp_path):
        spec = ReplicaSpec("entry:returns", {}, 1, 2, grace=0.3)
        strings = spec_to_environment(spec) | {"DILOCO_ENV_0": "%"}
        outcome = end(start("returns", strings=strings), tmp_path)
        assert outcome.reason is Reason.START_FAILED
        assert "environment variables is damaged" in outcome.error

    @pytest.mark.parametrize("where", ["run_id", "variable"])
    def test_what_no_environment_carries_starts_nothing(self, start, tmp_path, where):
        run_id = "a\0b" if where == "run_id" else "a"
        spec = ReplicaSpec("entry:returns", {}, 1, 2, grace=0.3, run_id=run_id)
        strings = spec_to_environment(spec)
        if where == "variable":
            strings |= variables_to_strings({"A": "a\0b"}, piece_bytes=2500)
        runner = start("returns", strings=strings)
        outcome = end(runner, tmp_path)
        assert (runner.returncode, outcome.reason) == (2, Reason.START_FAILED)
        assert "null byte" in outcome.error

    def test_no_such_file(self, start, tmp_path):
        runner = start("returns", None, "--spec-strings", str(tmp_path / "none"))
        assert "none" in end(runner, tmp_path).error


class TestFailure:
    def test_a_success_writes_none(self, start, tmp_path):
        assert end(start("returns"), tmp_path).exit_code == 0
        assert not (tmp_path / "failure").exists()

    @pytest.mark.parametrize("size", [512, 900])
    def test_a_failure_is_told_in_as_many_bytes_as_are_allowed(self, start, tmp_path, size):
        runner = start("wordy", None, "--message-bytes", str(size))
        outcome = end(runner, tmp_path)
        assert len((tmp_path / "failure").read_bytes()) <= size
        told = failure(tmp_path)
        assert (told.exit_code, told.reason, told.error_type) == (1, Reason.ERROR, "ValueError")
        assert told.error.startswith("ValueError: ")
        assert (told.started_at, told.attempt) == (outcome.started_at, 1)

    def test_a_timeout_is_told(self, start, tmp_path):
        runner = start("sleeps", {"mark": str(tmp_path / "pid")}, timeout=0.5)
        assert end(runner, tmp_path).reason is Reason.TIMEOUT
        assert failure(tmp_path).reason is Reason.TIMEOUT

    def test_a_signal_is_told(self, start, tmp_path):
        runner = start("leaves_politely", {"mark": str(tmp_path / "pid")}, "--restarts", "3")
        read_pid(tmp_path / "pid")
        runner.send_signal(signal.SIGTERM)
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.attempt) == (143, "SIGTERM", 1)
        assert failure(tmp_path).signal == "SIGTERM"

    def test_an_outcome_that_cannot_be_written_is_told_there(self, start, tmp_path):
        place = tmp_path / "outcome.json"
        place.mkdir()
        runner = start("returns")
        _, err = runner.communicate(timeout=PATIENCE)
        assert runner.returncode == 1
        assert "the outcome cannot be written" in err
        assert "the outcome cannot be written" in failure(tmp_path).error

    @pytest.mark.sampled
    @pytest.mark.parametrize("size", ["511", "x", "-1"])
    def test_too_few_bytes_are_refused(self, start, tmp_path, size):
        runner = start("returns", None, f"--message-bytes={size}")
        outcome = end(runner, tmp_path)
        assert outcome.reason is Reason.START_FAILED
        assert "--message-bytes must be a whole number from 512" in outcome.error


class TestResultBytes:
    def test_a_result_of_the_largest_size(self, start, tmp_path):
        runner = start("returns", {"a": "x" * 92}, "--result-bytes", "100")  # {"a":"…"}
        assert end(runner, tmp_path).result == {"a": "x" * 92}

    def test_a_larger_one_is_a_failure_that_says_so(self, start, tmp_path):
        runner = start("returns", {"a": "x" * 93}, "--result-bytes", "100")
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.result, outcome.error_type) == (
            79,
            None,
            "InvalidResult",
        )
        assert "101 bytes of JSON" in outcome.error
        assert "up to 100" in outcome.error
        assert failure(tmp_path).error == outcome.error


class TestRestarts:
    def test_a_failed_program_is_started_again_in_place(self, start, tmp_path):
        runner = start("fails_until", {"folder": str(tmp_path), "attempt": 3}, "--restarts", "5")
        outcome = end(runner, tmp_path)
        assert (outcome.result, outcome.attempt, outcome.exit_code) == (3, 3, 0)
        assert not (tmp_path / "failure").exists()
        assert not (tmp_path / "attempt-4").exists()

    def test_only_as_often_as_is_said(self, start, tmp_path):
        runner = start("fails_until", {"folder": str(tmp_path), "attempt": 9}, "--restarts", "1")
        outcome = end(runner, tmp_path)
        assert (outcome.attempt, outcome.error) == (2, "ValueError: attempt 2 fails")
        assert failure(tmp_path).attempt == 2
        said = [(tmp_path / f"attempt-{number}").read_text() for number in (1, 2)]
        assert said == ["not the last", "1"], "DILOCO_LAST_ATTEMPT"
        assert not (tmp_path / "attempt-3").exists()

    def test_a_program_that_is_killed_is_started_again(self, start, tmp_path):
        runner = start(
            "slow_at_first", {"folder": str(tmp_path)}, "--restarts", "1", timeout=PATIENCE
        )
        pid = read_pid(tmp_path / "attempt-1")
        os.kill(pid, signal.SIGKILL)
        outcome = end(runner, tmp_path)
        assert (outcome.result, outcome.attempt) == ("done", 2)

    @pytest.mark.sampled
    @pytest.mark.parametrize("number", ["-1", "many", "1.5"])
    def test_a_wrong_number_is_refused(self, start, tmp_path, number):
        outcome = end(start("returns", None, f"--restarts={number}"), tmp_path)
        assert "--restarts must be a whole number from 0" in outcome.error


class TestAttempts:
    def test_a_file_that_is_brought_back_counts_on(self, start, tmp_path):
        counter = tmp_path / "checkpoints/attempts.json"
        for life in (1, 2, 3):
            runner = start(
                "fails_until", {"folder": str(tmp_path), "attempt": 3}, "--attempts", str(counter)
            )
            outcome = end(runner, tmp_path)
            assert outcome.attempt == life
        assert outcome.result == 3

    def test_a_file_that_cannot_be_written_starts_nothing(self, start, tmp_path):
        (tmp_path / "file").touch()
        runner = start(
            "fails_until",
            {"folder": str(tmp_path), "attempt": 1},
            "--attempts",
            str(tmp_path / "file/attempts.json"),
        )
        assert end(runner, tmp_path).reason is Reason.START_FAILED
        assert not (tmp_path / "attempt-1").exists()
