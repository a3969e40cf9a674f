import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local._record import (
    RunRecord,
    outcome_of,
    read_record,
    status_from_dict,
    status_to_dict,
)
from diloco_local._rundir import AttemptDir, RunDir
from diloco_protocol import Outcome, Reason, ReplicaState, ReplicaStatus, SpecVersionError

RECORD = RunRecord(
    "u", "run", "f", (3, 4), 8, "whole", 1.5, None, 2, 1.0, "host", "pid:[1]", {"a": "b"}
)


@given(
    st.builds(
        ReplicaStatus,
        state=st.sampled_from(ReplicaState),
        attempt=st.integers(1, 9),
        reason=st.none() | st.sampled_from(Reason),
        stopping=st.booleans(),
        exit_code=st.none() | st.integers(0, 255),
        signal=st.none() | st.just("SIGKILL"),
        message=st.text(),
        started_at=st.none() | st.floats(0, 2e9),
        finished_at=st.none() | st.floats(0, 2e9),
        native=st.text(),
    )
)
def test_a_status_comes_back(status):
    found = status_from_dict(json.loads(json.dumps(status_to_dict(status))))
    assert found == status
    assert type(found.state) is ReplicaState
    assert found.reason is None or type(found.reason) is Reason


def test_a_record_comes_back(tmp_path):
    run = RunDir(tmp_path)
    assert read_record(run) is None
    run.record.write_text(json.dumps(RECORD.to_dict()))
    assert read_record(run) == RECORD
    assert RECORD.marker(3) == "u/3"


def test_a_record_of_another_version_is_refused(tmp_path):
    run = RunDir(tmp_path)
    run.record.write_text(json.dumps({**RECORD.to_dict(), "version": 99}))
    with pytest.raises(SpecVersionError, match="99"):
        read_record(run)


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
