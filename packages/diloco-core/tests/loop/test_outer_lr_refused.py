"""Outer learning rates that cannot be used are refused: when the loop is made, at their sync, or
when they are asked for.
"""

import math

import pytest
import torch
from delay_lab import exchanges
from rates_lab import loop

from diloco_core import (
    ConfigurationError,
    MismatchError,
    SyncError,
    in_process,
)
from diloco_core.testing import run_replicas

KINDS = ("threads", "store", "sharded", "gather")


class NoRate(torch.optim.Optimizer):
    """Subtracts the gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


def fails(sync):
    raise LookupError("no such sync")


class TestBadInput:
    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (fails, r"outer_lr\(1\) raised LookupError: no such sync"),
            (lambda: 1.0, r"outer_lr\(1\) raised TypeError"),
            (lambda sync: 0.0, r"what outer_lr\(1\) returns must be positive, not 0.0"),
            (lambda sync: -1, r"what outer_lr\(1\) returns must be positive, not -1.0"),
            (lambda sync: math.nan, r"what outer_lr\(1\) returns must be a finite number, not nan"),
            (lambda sync: math.inf, r"what outer_lr\(1\) returns must be a finite number, not inf"),
            (lambda sync: None, r"what outer_lr\(1\) returns must be a finite number, not None"),
            (lambda sync: True, r"what outer_lr\(1\) returns must be a finite number, not True"),
        ],
    )
    def test_a_function_that_cannot_be_used_is_refused_when_the_loop_is_made(self, function, named):
        with pytest.raises(ConfigurationError, match=named):
            loop(outer_lr=function)

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_that_fails_later_names_the_sync_and_nothing_is_sent(self, kind, lab):
        """All replicas fail, by the same error, with the values that they had."""

        def replica(exchange):
            model, inner, outer = loop(exchange, outer_lr=lambda sync: 0.5 if sync < 3 else "x")

            def train():
                with outer:
                    for step in range(4):
                        lab.push(model, inner, 0, step)

            with pytest.raises(ConfigurationError, match=r"what outer_lr\(3\) returns"):
                train()
            return outer.committed

        assert lab.run(replica, exchanges(kind, 2)) == [2, 2]

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (0, "must be positive, not 0.0"),
            (-0.1, "must be positive"),
            (math.nan, "must be a finite number, not nan"),
            ("0.5", "must be a finite number, not '0.5'"),
            (None, "must be a finite number, not None"),
            (lambda sync: 1.0, "must be a finite number"),
        ],
    )
    def test_a_rate_that_cannot_be_used_is_refused_and_the_run_goes_on(self, value, named, lab):
        model, inner, outer = loop()
        with outer:
            with pytest.raises(ConfigurationError, match=f"the outer learning rate {named}"):
                outer.set_outer_lr(value)
            lab.push(model, inner, 0, 0)
        assert outer.committed == 1

    def test_outside_of_the_block(self, lab):
        model, inner, outer = loop()
        with pytest.raises(SyncError, match="inside the block"):
            outer.set_outer_lr(0.5)
        with outer:
            lab.push(model, inner, 0, 0)
        with pytest.raises(SyncError, match="inside the block"):
            outer.set_outer_lr(0.5)

    def test_an_optimizer_without_a_learning_rate(self):
        with pytest.raises(ConfigurationError, match="NoRate has no learning rate"):
            loop(outer_optimizer=NoRate, outer_lr=lambda sync: 0.5)
        outer = loop(outer_optimizer=NoRate)[2]
        with (
            outer,
            pytest.raises(ConfigurationError, match=r"set_outer_lr\(\) was called.*NoRate has no"),
        ):
            outer.set_outer_lr(0.5)

    def test_a_number_together_with_an_optimizer_is_refused_as_before(self):
        with pytest.raises(ConfigurationError, match=r"outer_lr=0.5 cannot be given together"):
            loop(outer_optimizer=torch.optim.SGD, outer_lr=0.5)

    def test_an_optimizer_that_the_caller_changes_by_hand(self, lab):
        """The change would be undone by the next outer step, and in no record."""
        made = []

        def keeps(parameters):
            made.append(torch.optim.SGD(parameters, lr=0.5))
            return made[-1]

        model, inner, outer = loop(outer_optimizer=keeps, outer_lr=lambda sync: 0.5 / sync)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                made[-1].param_groups[0]["lr"] = 0.9
                lab.push(model, inner, 0, 1)

        with pytest.raises(ConfigurationError, match=r"outer_lr is 0\.9 for fragment 0"):
            train()

    def test_a_number_here_and_a_function_there(self, lab):
        def replica(exchange):
            with loop(exchange, outer_lr=[0.5, lambda sync: 0.5][exchange.rank])[2]:
                pass

        for error in run_replicas(replica, in_process(2)):
            assert isinstance(error, MismatchError)
            assert "setting 'outer_lr'" in str(error)
            assert "a function of the sync" in str(error)
