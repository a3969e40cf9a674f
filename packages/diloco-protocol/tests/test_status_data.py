"""A status in and out of JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError, Reason, ReplicaState, ReplicaStatus
from diloco_protocol.backend import status_from_data, status_to_data


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
    found = status_from_data(json.loads(json.dumps(status_to_data(status))))
    assert found == status
    assert type(found.state) is ReplicaState
    assert found.reason is None or type(found.reason) is Reason


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempt", 0), ("attempt", 10**400), ("exit_code", -1), ("exit_code", 256), ("started_at", -1.0),
     ("finished_at", float("nan")), ("finished_at", 1e300), ("state", "over"), ("reason", "because"), ("stopping", 1)],
)  # fmt: skip
def test_values_that_no_status_has(field, value):
    data = status_to_data(ReplicaStatus(ReplicaState.FAILED, reason=Reason.ERROR, exit_code=1))
    assert status_from_data(data).exit_code == 1
    with pytest.raises(InvalidRequestError):
        status_from_data({**data, field: value})


@pytest.mark.parametrize("data", [None, 3, "failed", [], {}, {"state": "failed"}])
def test_what_is_no_status_is_refused(data):
    with pytest.raises(InvalidRequestError, match="a status must be an object with the fields"):
        status_from_data(data)
