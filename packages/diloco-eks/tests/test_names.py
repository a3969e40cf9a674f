"""Names: what a cluster takes passes, everything else is refused before it is sent."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._request import _names as names
from diloco_protocol import InvalidRequestError

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
CHARACTERS = st.sampled_from("abcz019-._AZ/ ü")


@given(st.text(CHARACTERS, max_size=70), st.integers(1, 10_000))
def test_a_job_name_fits_with_its_last_index(run_id, count):
    longest = f"{run_id}-{count - 1}"
    legal = len(longest) <= 63 and bool(LABEL.fullmatch(longest)) and bool(LABEL.fullmatch(run_id))
    if legal:
        assert names.job_name(run_id, count) == run_id
    else:
        with pytest.raises(InvalidRequestError, match="cannot name a Job"):
            names.job_name(run_id, count)


@pytest.mark.parametrize(
    ("length", "count", "legal"), [(61, 4, True), (62, 4, False), (61, 11, False), (60, 11, True)]
)
def test_the_limits_that_were_observed(length, count, legal):
    name = "a" * length
    if legal:
        assert names.job_name(name, count) == name
    else:
        with pytest.raises(InvalidRequestError, match=f"1 to {63 - len(str(count - 1)) - 1} "):
            names.job_name(name, count)


@pytest.mark.parametrize("name", ["Default", "a_b", "-a", "a.b", "", "a" * 64, None, 3])
def test_a_namespace_is_a_dns_label(name):
    with pytest.raises(InvalidRequestError, match="namespace must be"):
        names.check_dns_label("namespace", name)


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ({"a b": "c"}, "has the key 'a b'"),
        ({"": "c"}, "has the key ''"),
        ({"Team/x": "c"}, "has the key 'Team/x'"),
        ({"team": "a/b"}, "annotations="),
        ({"team": "x" * 64}, "at most 63"),
        ({"team": "-x"}, "a letter or digit"),
        ({"diloco.dev/run-id": "x"}, "may not set"),
        ({"batch.kubernetes.io/job-name": "x"}, "may not set"),
        ({"controller-uid": "x"}, "may not set"),
        ({"kueue.x-k8s.io/queue-name": "x"}, "or queue="),
        ({"app.kubernetes.io/managed-by": "x"}, "may not set"),
    ],
)
def test_labels_that_are_refused(labels, what):
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        names.check_labels("labels", labels)


def test_labels_that_pass():
    labels = {
        "team": "vision",
        "example.com/cost-center": "A_1.b",
        "empty": "",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert names.check_labels("labels", labels) == labels


@pytest.mark.parametrize(
    "reference", ["", "name", "name/", "/key", "Na me/key", "name/key/more", "sk-123456"]
)
def test_secrets_are_references(reference):
    with pytest.raises(InvalidRequestError, match="never a value") as caught:
        names.secret_reference("TOKEN", reference)
    assert "sk-123456" not in str(caught.value)


def test_a_secret_reference():
    assert names.secret_reference("TOKEN", "hub.token/t_1") == {"name": "hub.token", "key": "t_1"}
