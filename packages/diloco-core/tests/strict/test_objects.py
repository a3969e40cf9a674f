"""The keys of one sync's objects, and what they say."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from diloco_core._arithmetic._contribution import Contribution
from diloco_core._arithmetic._layout import Rule
from diloco_core._arithmetic._rate import NO_RATE, Proposal, Rate
from diloco_core._arithmetic._weights import Amount, Weighting
from diloco_core._model._partition import NamedTensor
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer, outer_factory
from diloco_core._strict._sync._objects import SyncObjects, state_key
from diloco_core._terms._terms import Terms

RATE = Rate((0.5,))
RUN, OTHER_RUN = 32 * "a", 32 * "b"


def objects(run=RUN, number=3, size=4, weighting=Weighting.EQUAL):
    """Those of a fragment with one group of tensors, which takes outer steps."""
    weight = NamedTensor("weight", torch.nn.Parameter(torch.ones(size)), Rule.OUTER)
    outer = OuterOptimizer(outer_factory(None, 0.5, 0.0, False))
    job = Fragment("0", [weight], outer, 2, Terms(weighting=weighting))
    job.contribution = Contribution(proposal=Proposal(RATE))
    job.take_snapshot()
    job.begin()
    return SyncObjects(SimpleNamespace(run=run, world_size=2, chunk_bytes=64), number, job)


def test_a_key_says_who_has_contributed_and_what_it_carries():
    ours = objects()
    key = ours.delta_key(1, 0b1, RATE)
    assert key.startswith("deltas/00000003/00001.")
    assert (ours.contributor(key), ours.carried(1, key)) == (1, 0b1)
    assert ours.state_key(1) == state_key(RUN, 3, 1)


@pytest.mark.parametrize("groups", [0b0, 0b10, 0b11])
def test_a_contribution_carries_all_that_it_must_and_nothing_else(groups):
    """Without it, the sum would be one of some replicas' values only."""
    ours = objects()
    key = ours.delta_key(1, groups, RATE)
    assert ours.contributor(key) == 1
    assert ours.carried(1, key) is None


@pytest.mark.parametrize(
    "other",
    [objects(number=4), objects(size=5), objects(run=OTHER_RUN)],
    ids=["sync", "tensors", "run"],
)
def test_what_is_of_another_sync_or_run_carries_nothing(other):
    assert objects().carried(1, other.delta_key(1, 0b1, RATE)) is None


def test_a_contribution_to_another_run_has_no_contributor():
    assert objects().contributor(objects(run=OTHER_RUN).delta_key(1, 0b1, RATE)) is None


def test_keys_of_contributions_say_all_that_they_are():
    """The checksums of a file begin with its key, so it is not valid as any other contribution."""
    ours = objects(weighting=Weighting.TOKENS)
    elsewhere = [
        objects(**other, weighting=Weighting.TOKENS)
        for other in ({"run": OTHER_RUN}, {"number": 4}, {"size": 5})
    ]
    amounts = Amount(1, 7), Amount(2, 7), Amount(1, 8)
    rates = Rate((0.5,)), Rate((0.25,)), Rate((0.5,), 1, 0), Rate((0.5,), 1, 1)
    keys = [
        ours.delta_key(*each) for each in itertools.product((0, 1), (0b1, 0b11), rates, amounts)
    ]
    keys += [other.delta_key(0, 0b1, rates[0], amounts[0]) for other in elsewhere]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "rate",
    [Rate((0.25,)), Rate((0.5,), 3, 1), Rate((1e-300,), 999_999_999, 99_999)],
)
def test_a_key_says_the_learning_rate_that_is_proposed(rate):
    ours = objects()
    key = ours.delta_key(1, 0b1, rate)
    assert (ours.carried(1, key), ours.proposed(key)) == (0b1, rate)


@pytest.mark.parametrize(
    "lr",
    [
        "",
        "." + Rate((0.5, 0.5)).text,
        ".0-0-0000000000000000",
        ".0-0-7ff0000000000000",
        ".0-0-7ff8000000000000",
        ".0-0-bfe0000000000000",
        ".00-0-3fe0000000000000",
        ".0-0-3FE0000000000000",
        ".-3fe0000000000000",
    ],
    ids=["none", "two", "zero", "infinite", "nan", "negative", "leading zero", "capitals", "no n"],
)
def test_without_a_learning_rate_that_can_be_used_it_carries_nothing(lr):
    """It would not be known with which rate the owners of the shards take the outer step."""
    ours = objects()
    key = ours.delta_key(1, 0b1, NO_RATE).replace(".safetensors", f"{lr}.safetensors")
    assert ours.carried(1, key) is None


@pytest.mark.parametrize(
    "key", ["deltas/00000003/hello", "deltas/00000003/", "", "state/00000003/00001.x"]
)
def test_stray_objects_have_no_contributor(key):
    assert objects().contributor(key) is None
    assert objects().carried(0, key) is None
