"""An outcome comes back exactly as it went in, or is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import json_values, text

from diloco_protocol import InvalidRequestError, Outcome, Reason, SpecVersionError


def exactly(a, b):
    """Equal, and of the same types all the way down (1 is not 1.0 and not True)."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


class TestOutcome:
    @given(json_values, st.sampled_from(Reason), st.none() | text)
    def test_json(self, result, reason, error):
        outcome = Outcome(
            3, signal="SIGKILL", error=error, result=result, reason=reason, started_at=1.5
        )
        again = Outcome.from_json(outcome.to_json())
        assert again == outcome
        assert again.reason is reason
        assert exactly(again.result, result)

    @pytest.mark.parametrize("data", ["", "[]", "{}", '{"version": 9}', '{"version": 1}'])
    def test_what_is_no_outcome_is_refused(self, data):
        with pytest.raises((InvalidRequestError, SpecVersionError)):
            Outcome.from_json(data)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("exit_code", "1"),
            ("exit_code", True),
            ("signal", 9),
            ("error", []),
            ("started_at", "0"),
        ],
    )
    def test_a_field_of_the_wrong_type_is_refused_by_name(self, field, value):
        data = {**json.loads(Outcome(1).to_json()), field: value}
        with pytest.raises(InvalidRequestError, match=f"this outcome has {field}="):
            Outcome.from_json(json.dumps(data))

    def test_a_reason_of_the_future_is_refused(self):
        text = Outcome(1).to_json().replace('"reason":"error"', '"reason":"bored"')
        with pytest.raises(InvalidRequestError, match="unknown reason 'bored'"):
            Outcome.from_json(text)

    def test_a_result_that_is_not_json_is_refused(self):
        with pytest.raises(InvalidRequestError, match=r"result\[1\] is a builtins\.tuple"):
            Outcome(0, result=[1, (2,)]).to_json()
