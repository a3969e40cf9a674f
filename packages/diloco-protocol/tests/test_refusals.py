"""The refusals that backends share."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from diloco_protocol import InvalidRequestError, ReplicaHandle, make_request
from diloco_protocol.backend import (
    Options,
    check_ended,
    check_metadata,
    check_text,
    option,
    refuse,
)

REASONS = {"cpu": "it has none", "secrets": "it keeps none", "spot": "it is all yours"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cpu": 4}, "cpu='4' cannot be honoured by the moon: it has none"),
        (
            {"secrets": {"TOKEN": "store/x"}},
            "secrets=<redacted> cannot be honoured by the moon: it keeps none",
        ),
        ({"spot": True}, "spot=True cannot be honoured by the moon: it is all yours"),
    ],
)
def test_what_a_platform_does_not_have_is_refused_with_the_reason(asked, words):
    with pytest.raises(InvalidRequestError) as caught:
        refuse(make_request(1, "trainer:train", {}, **asked), "the moon", REASONS)
    assert str(caught.value) == words


def test_a_launch_that_asks_for_nothing_of_it_is_taken():
    refuse(make_request(1, "trainer:train", {}, spot=False, memory="1Gi"), "the moon", REASONS)


def test_a_handle_without_some_metadata_is_refused_by_their_names():
    handle = ReplicaHandle(0, "moon", {"crater": "5"}, run_id="run-1")
    check_metadata(handle, "a crater", {"crater"})
    with pytest.raises(InvalidRequestError, match=r"lead to a crater: it lacks the metadata a, b$"):
        check_metadata(handle, "a crater", {"crater", "b", "a"})


def test_a_run_is_removed_only_when_all_of_it_has_ended():
    check_ended("run-1", [])
    with pytest.raises(InvalidRequestError, match=r"2 replicas of run 'run-1' .* rank 3: cancel"):
        check_ended("run-1", [10, 3])
    with pytest.raises(InvalidRequestError, match="such as job-0: cancel"):
        check_ended("run-1", ["job-0"], "")


@dataclass(frozen=True, eq=False, repr=False)
class Choices(Options):
    """Options with and without a value.

    Attributes:
        owner: Whose they are.
        color: Their color.
    """

    owner: str | None = option(None, check=check_text)
    color: str = option("red", check=check_text)


def test_none_is_allowed_where_it_is_the_default():
    assert Choices(owner=None).owner is None
    assert Choices(owner="me").owner == "me"
    for wrong in ({"owner": ""}, {"color": None}):
        with pytest.raises(InvalidRequestError, match="must be non-empty text"):
            Choices(**wrong)
