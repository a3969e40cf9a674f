"""Attempts in one place: which failures lead to another, and what counts over interruptions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import Outcome, Reason, ReplicaSpec
from diloco_protocol._attempts import AttemptCounter, run_attempts

SPEC = ReplicaSpec("m:f", {}, 0, 1)


class Script:
    """Plays attempts: exit codes, and after which of them a signal to end has come."""

    def __init__(self, *codes, told_after=None):
        self.codes = list(codes)
        self.told_after = told_after
        self.attempts = []
        self.last = []

    def run(self, spec, last):
        self.attempts.append(spec.attempt)
        self.last.append(last)
        return Outcome(self.codes.pop(0), attempt=spec.attempt)

    def told(self):
        return self.told_after is not None and len(self.attempts) >= self.told_after


def play(script, restarts=0, path=None, spec=SPEC):
    return run_attempts(spec, script.run, script.told, AttemptCounter(path), restarts)


@pytest.mark.parametrize(
    ("codes", "restarts", "attempts", "code"),
    [
        ([0], 3, [1], 0),
        ([3], 0, [1], 3),
        ([3, 0], 1, [1, 2], 0),
        ([3, 143, 4], 2, [1, 2, 3], 4),
        ([3, 4, 0, 9], 5, [1, 2, 3], 0),
        ([3, 79, 0], 5, [1, 2], 79),  # another process has taken its place
    ],
)
def test_failed_attempts_are_started_again_as_often_as_is_allowed(codes, restarts, attempts, code):
    script = Script(*codes)
    outcome = play(script, restarts)
    assert (script.attempts, outcome.exit_code, outcome.attempt) == (attempts, code, attempts[-1])


@pytest.mark.parametrize(
    ("restarts", "last"),
    [(2, [False, False, True]), (0, [True]), (None, [False])],
)
def test_an_attempt_knows_whether_nothing_starts_it_again(restarts, last):
    script = Script(1, 1, 1)
    assert play(script, restarts).exit_code == 1
    assert script.last == last


def test_who_was_told_to_end_is_not_started_again():
    script = Script(1, 1, 1, told_after=2)
    assert play(script, 5).exit_code == 1
    assert script.attempts == [1, 2]


def test_attempts_are_counted_on_from_what_the_spec_says():
    script = Script(1, 0)
    play(script, 1, spec=ReplicaSpec("m:f", {}, 0, 1, attempt=4))
    assert script.attempts == [4, 5]


class TestOverInterruptions:
    """Every life of the machine has a runner of its own; only the file is brought back."""

    def test_the_attempt_grows(self, tmp_path):
        path = tmp_path / "checkpoints/attempts.json"
        for life in (1, 2, 3):
            script = Script(143, told_after=1)
            play(script, path=path)
            assert script.attempts == [life]

    def test_failures_are_not_forgotten(self, tmp_path):
        path = tmp_path / "attempts.json"
        first = Script(1, 143, told_after=2)
        play(first, 1, path)
        second = Script(1)
        assert play(second, 1, path).exit_code == 1
        assert (first.attempts, second.attempts) == ([1, 2], [3])

    def test_an_interruption_is_no_failure(self, tmp_path):
        path = tmp_path / "attempts.json"
        play(Script(143, told_after=1), 1, path)
        again = Script(1, 0)
        assert play(again, 1, path).exit_code == 0
        assert again.attempts == [2, 3]

    def test_it_is_counted_before_the_attempt_runs(self, tmp_path):
        path = tmp_path / "attempts.json"

        def run(spec, last):
            assert json.loads(path.read_text()) == {"started": 1, "failed": 0}
            raise KeyboardInterrupt  # or the power goes

        with pytest.raises(KeyboardInterrupt):
            run_attempts(SPEC, run, lambda: False, AttemptCounter(path), 0)
        assert AttemptCounter(path).started == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["attempts.json"]

    @given(
        text=st.text(max_size=20)
        | st.sampled_from(
            [
                "[]",
                "{}",
                '{"started": 2, "failed": 3}',
                '{"started": true, "failed": 0}',
                '{"started": -1, "failed": -2}',
                "2",
                '{"started": 1099511627776, "failed": 0}',
                '{"started": 1, "failed": 0, "more": "' + "x" * 5000 + '"}',
                "[" * 4000,
            ]
        )
    )
    def test_a_damaged_file_counts_as_none(self, tmp_path_factory, text):
        path = tmp_path_factory.mktemp("counter") / "attempts.json"
        path.write_text(text, encoding="utf-8")
        script = Script(0)
        play(script, path=path)
        assert script.attempts == [1]
        assert AttemptCounter(path).started == 1

    def test_a_count_that_cannot_be_written_is_an_error(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(OSError):
            play(Script(0), path=tmp_path / "file/attempts.json")


def test_the_reason_is_that_of_the_last_attempt():
    reasons = iter([Reason.ERROR, Reason.TIMEOUT])
    outcome = run_attempts(
        SPEC,
        lambda spec, last: Outcome(1, reason=next(reasons), attempt=spec.attempt),
        lambda: False,
        AttemptCounter(),
        1,
    )
    assert (outcome.reason, outcome.attempt) == (Reason.TIMEOUT, 2)
