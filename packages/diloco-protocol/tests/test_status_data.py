"""A status in and out of JSON: what is written can be read, and nothing else is written."""

import contextlib
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import odd_values, statuses

from diloco_protocol import InvalidRequestError, Reason, ReplicaState, ReplicaStatus
from diloco_protocol._fields import TEXT_CHARACTERS
from diloco_protocol.backend import status_from_data, status_to_data

names = st.sampled_from(sorted(asdict(ReplicaStatus(ReplicaState.RUNNING))))


@given(statuses)
def test_a_status_comes_back(status):
    found = status_from_data(json.loads(json.dumps(status_to_data(status))))
    assert found == status
    assert type(found.state) is ReplicaState
    assert found.reason is None or type(found.reason) is Reason


@given(statuses, names, odd_values)
def test_a_changed_field_is_refused_or_comes_back(status, name, value):
    data = {**status_to_data(status), name: value}
    with contextlib.suppress(InvalidRequestError):
        read = status_from_data(json.loads(json.dumps(data)))
        assert status_from_data(status_to_data(read)) == read


@given(statuses, names, odd_values)
def test_what_the_writer_takes_the_reader_takes(status, name, value):
    try:
        written = status_to_data(ReplicaStatus(**{**asdict(status), name: value}))
    except InvalidRequestError:
        return
    assert status_to_data(status_from_data(json.loads(json.dumps(written)))) == written


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempt", 0), ("attempt", 2**31), ("attempt", 10**400), ("exit_code", -1),
     ("exit_code", 256), ("exit_code", 4242), ("signal", "5"), ("started_at", -1.0),
     ("finished_at", float("nan")), ("finished_at", 1e300), ("state", "over"),
     ("reason", "because"), ("stopping", 1)],
)  # fmt: skip
def test_values_that_no_status_has(field, value):
    fields = {"state": ReplicaState.FAILED, "reason": Reason.ERROR, "exit_code": 1}
    assert status_from_data(status_to_data(ReplicaStatus(**fields))).exit_code == 1
    with pytest.raises(InvalidRequestError, match=f"a status has {field}="):
        status_from_data({**status_to_data(ReplicaStatus(**fields)), field: value})
    with pytest.raises(InvalidRequestError, match=f"a status has {field}="):
        status_to_data(ReplicaStatus(**{**fields, field: value}))


def test_texts_are_written_as_every_reader_takes_them():
    """The end of a replica must not be lost for what stands in its message."""
    status = ReplicaStatus(ReplicaState.FAILED, message="no \udcff", native="x" * 10**6)
    read = status_from_data(status_to_data(status))
    assert read.message == "no \\udcff"
    assert len(read.native) <= TEXT_CHARACTERS


@pytest.mark.parametrize("data", [None, 3, "failed", [], {}, {"state": "failed"}])
def test_what_is_no_status_is_refused(data):
    with pytest.raises(InvalidRequestError, match="a status must be an object with the fields"):
        status_from_data(data)
