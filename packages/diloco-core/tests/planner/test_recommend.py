"""Recommended hyperparameters: the published figures, their sources, and where the data ends."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_core import ConfigurationError, Recommendation, recommend

SIZES = st.floats(min_value=1, max_value=1e13)
REPLICAS = st.integers(min_value=1, max_value=500)
STEPS = st.integers(min_value=1, max_value=3000)


class TestTheOuterLearningRate:
    @pytest.mark.parametrize(
        ("replicas", "best"),
        [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (6, 0.7), (8, 0.8), (99, 0.8)],
    )
    def test_as_measured_with_thirty_steps(self, replicas, best):
        assert recommend(1e9, replicas, 30).outer_lr == best

    @pytest.mark.parametrize(
        ("replicas", "best"),
        [(1, 0.6), (2, 0.7), (3, 0.7), (4, 0.7), (6, 0.75), (8, 0.8), (99, 0.8)],
    )
    @pytest.mark.parametrize("sync_every", [100, 500])
    def test_is_higher_with_more_steps_which_is_said_to_be_inferred(
        self, replicas, best, sync_every
    ):
        found = recommend(1e9, replicas, sync_every)
        assert found.outer_lr == best
        assert found.sources["outer_lr"].startswith("inferred for H of 100 and more")
        assert "0.7 with 8 replicas at H = 500" in found.sources["outer_lr"]

    def test_is_the_measured_one_up_to_a_hundred_steps(self):
        found = recommend(1e9, 8, 99)
        assert found.outer_lr == 0.8
        assert "inferred" not in found.sources["outer_lr"]

    def test_a_number_of_replicas_that_was_not_measured_is_said(self):
        assert "with 2 replicas and with 4" in recommend(1e9, 3, 30).sources["outer_lr"]
        assert (
            "half way between 0.6 and 0.8, the best at H = 30"
            in recommend(1e9, 7, 30).sources["outer_lr"]
        )
        assert (
            "with 8 replicas, the most that were measured"
            in recommend(1e9, 9, 30).sources["outer_lr"]
        )

    @given(SIZES, REPLICAS, REPLICAS, STEPS, STEPS)
    def test_rises_with_replicas_and_with_steps(self, size, few, many, short, long):
        few, many = sorted((few, many))
        short, long = sorted((short, long))
        assert recommend(size, few, short).outer_lr <= recommend(size, many, long).outer_lr


class TestTheFits:
    @pytest.mark.parametrize(
        ("size", "replicas", "inner_lr", "batch"),
        # By hand: 22256 * N**-0.8827 * M**0.2929 and 0.00709 * N**0.4695 * M**0.3399.
        [(1e9, 1, 2.5e-4, 119), (1e9, 8, 4.7e-4, 242), (1e8, 4, 2.9e-3, 65)],
    )
    def test_of_the_inner_learning_rate_and_the_batch(self, size, replicas, inner_lr, batch):
        found = recommend(size, replicas, 30)
        assert found.inner_lr == inner_lr
        assert found.batch == batch
        assert "2503.09799" in found.sources["inner_lr"]
        assert "2503.09799" in found.sources["batch"]

    @pytest.mark.parametrize(
        ("size", "replicas"), [(35e6 - 1, 1), (10e9 + 1000, 1), (1e9, 9), (1, 1), (1e13, 99)]
    )
    def test_there_is_no_value_where_there_is_no_data(self, size, replicas):
        found = recommend(size, replicas, 30)
        assert found.inner_lr is None
        assert found.batch is None
        assert any(limit.startswith("There is no data for") for limit in found.limits)
        assert "inner_lr = no data: the fits do not reach this run" in str(found)

    @pytest.mark.parametrize(("size", "replicas"), [(35e6, 8), (10e9, 8), (2.4e9, 1)])
    def test_there_is_one_up_to_the_ends(self, size, replicas):
        found = recommend(size, replicas, 30)
        assert found.inner_lr is not None
        assert found.batch is not None


class TestWhereTheDataEnds:
    def test_nothing_is_said_about_a_run_as_in_the_papers(self):
        assert recommend(335e6, 8, 30).limits == ()
        assert "Where the data ends" not in str(recommend(2.4e9, 1, 30))

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ((334e6, 8, 30), "models of 335M parameters and more"),
            ((34e6, 8, 30), "models with less than 35M parameters"),
            ((2.5e9, 8, 30), "models of up to 2.4B parameters; the paper extrapolates them to 10B"),
            ((11e9, 8, 30), "models with more than 10B parameters"),
            ((1e9, 9, 30), "no data for more than 8 replicas"),
            ((1e9, 8, 31), "measured with 30 inner steps"),
            ((1e9, 8, 1), "Of all H, 1 was the worst"),
            ((1e9, 8, 301), "went up to 300 inner steps"),
            ((1e9, 8, 500), "went up to 300 inner steps"),
            ((1e9, 8, 501), "no data for more than 500 inner steps"),
        ],
    )
    def test_is_said(self, arguments, sentence):
        found = recommend(*arguments)
        assert sum(sentence in limit for limit in found.limits) == 1
        assert sentence in str(found)

    @pytest.mark.parametrize("arguments", [(1e9, 8, 300), (35e6, 8, 30), (1e9, 8, 2)])
    def test_is_not_said_too_early(self, arguments):
        said = " ".join(recommend(*arguments).limits)
        assert "no data" not in said
        assert "went up to" not in said
        assert "worst" not in said


class TestWhatIsShown:
    @given(SIZES, REPLICAS, STEPS)
    def test_every_value_has_a_source(self, size, replicas, sync_every):
        found = recommend(size, replicas, sync_every)
        text = str(found)
        for name in ("outer_lr", "outer_momentum", "nesterov", "inner_lr", "batch"):
            value = getattr(found, name)
            assert (
                f"  {name} = {'no data' if value is None else value}: {found.sources[name]}" in text
            )
        for sentence in (*found.limits, *found.notes):
            assert f"  * {sentence}\n" in text + "\n"
        assert 0 < found.outer_lr <= 1
        assert 0 <= found.outer_momentum < 1

    def test_the_other_values_are_those_of_the_papers(self):
        found = recommend(1e9, 8, 30)
        assert (found.outer_momentum, found.nesterov) == (0.9, True)
        assert any("Muon" in note and "0.7" in note and "0.6" in note for note in found.notes)
        assert any("Covenant-72B" in note for note in found.notes)

    def test_it_can_be_compared_copied_and_sent(self):
        found = recommend(1e9, 8, 30)
        assert isinstance(found, Recommendation)
        assert found == recommend(10**9, 8, 30) != recommend(1e9, 4, 30)
        assert hash(found) == hash(recommend(1e9, 8, 30))
        assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


class TestAModel:
    def test_counts_its_trainable_parameters_tied_ones_once(self):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
        model[1].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        found = recommend(model, 2, 30)
        assert found == recommend(16, 2, 30)
        assert found.parameters == 16

    def test_may_be_on_the_meta_device(self):
        with torch.device("meta"):
            model = torch.nn.Linear(40_000, 40_000, bias=False)
        assert recommend(model, 2, 30) == recommend(1.6e9, 2, 30)

    def test_without_trainable_parameters_is_refused(self):
        with pytest.raises(ConfigurationError, match="no trainable parameter"):
            recommend(torch.nn.ReLU(), 2, 30)

    def test_without_shapes_is_refused(self):
        with pytest.raises(ConfigurationError, match="'weight' does not have a shape yet"):
            recommend(torch.nn.LazyLinear(4), 2, 30)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0, 2, 30), "parameters must be a positive number"),
        ((math.nan, 2, 30), "parameters must be a positive number"),
        ((True, 2, 30), "parameters must be a positive number"),
        (
            ("1B", 2, 30),
            "parameters must be a number of parameters or a torch.nn.Module, not a str",
        ),
        ((1e9, 0, 30), "replicas must be a whole number"),
        ((1e9, 2.5, 30), "replicas must be a whole number"),
        ((1e9, 2, 0), "sync_every must be a whole number"),
        ((1e9, 2, 30.0), "sync_every must be a whole number"),
    ],
)
def test_other_arguments_are_refused(arguments, word):
    with pytest.raises(ConfigurationError, match=word):
        recommend(*arguments)
