import json

import pytest

from diloco_local._record import (
    RunRecord,
    outcome_of,
    read_record,
)
from diloco_local._rundir import AttemptDir, RunDir
from diloco_protocol import BackendError, Outcome, SpecVersionError

RECORD = RunRecord(
    "u", "run", "f", (3, 4), 8, "whole", 1.5, None, 2, 1.0, "host", "pid:[1]", {"a": "b"}
)


def test_a_record_comes_back(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    assert read_record(run) is None
    run.record.write_text(json.dumps(RECORD.to_dict()))
    assert read_record(run) == RECORD
    assert RECORD.marker(3) == "u/3"


def test_a_record_of_another_version_is_refused(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.record.write_text(json.dumps({**RECORD.to_dict(), "version": 99}))
    with pytest.raises(SpecVersionError, match="99") as caught:
        read_record(run)
    assert isinstance(caught.value, BackendError)


def test_outcomes(tmp_path):
    attempt = AttemptDir(tmp_path)
    assert outcome_of(attempt) == (None, "")
    attempt.outcome.write_text(Outcome(3, error="bad").to_json())
    assert outcome_of(attempt) == (Outcome(3, error="bad"), "")
    for damage in (b"{", b'{"version": 99}', b"\xff"):
        attempt.outcome.write_bytes(damage)
        found, problem = outcome_of(attempt)
        assert found is None
        assert "cannot be read" in problem
