"""Test when a step counts: several inner optimizers around one model."""

import copy

import pytest
import torch
from loop_lab import AVERAGING, loop
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, in_process


class TestSeveralOptimizers:
    """A matrix and a vector, each with an optimizer of its own."""

    def parts(self, lab):
        model = lab.fill(nn.Linear(3, 2))
        return model, [
            torch.optim.SGD([model.weight], lr=1.0),
            torch.optim.SGD([model.bias], lr=1.0),
        ]

    def gradients(self, model, rank, step):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    def walk(self, model, two, *steps):
        """Give the model new gradients for every step, and let these optimizers take it."""
        for step, numbers in enumerate(steps):
            self.gradients(model, 0, step)
            for number in numbers:
                two[number].step()

    def loop(self, lab, exchange=None, sync_every=2, **options):
        model, two = self.parts(lab)
        return loop(exchange, model, two, sync_every=sync_every, **options)

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("fragments", [1, 2])
    def test_the_numbers_are_those_of_one_optimizer(self, lab, fragments, turned):
        """The one that steps second keeps its gradient: a sync comes after the step of the last."""

        def replica(exchange, together):
            model, two = self.parts(lab)
            if together:
                two = [torch.optim.SGD(model.parameters(), lr=1.0)]
            order = two[::-1] if turned else two
            options = {"sync_every": 2, "fragments": fragments, "outer_lr": 0.5}
            with DiLoCo(model, two, exchange, **options) as outer:
                for step in range(7):
                    self.gradients(model, exchange.rank, step)
                    for optimizer in order:
                        optimizer.step()
            return lab.values(model), outer.inner_steps

        apart = lab.run(lambda exchange: replica(exchange, False), in_process(3))
        wanted = lab.run(lambda exchange: replica(exchange, True), in_process(3))
        assert [steps for _, steps in apart + wanted] == [7] * 6
        assert lab.identical([held for held, _ in apart + wanted])

    def test_a_partner_that_the_gradient_scaler_skips(self, lab):
        """It counts when the other one steps again; a sync that is due waits for that step."""
        model, (first, second), outer, reports = self.loop(lab)
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0), []
        with outer:
            for step in range(5):
                self.gradients(model, 0, step)
                scaler.scale(torch.ones(1))
                if step == 1:
                    model.bias.grad[0] = torch.inf
                for optimizer in (first, second):
                    scaler.step(optimizer)
                    # The second one's step is still to come.
                    assert optimizer is second or model.bias.grad is not None
                scaler.update()
                seen.append((outer.inner_steps, outer.committed))
        # Step 1 is not complete; it counts at the beginning of step 2, whose end completes the
        # second sync's period too.
        assert seen == [(1, 0), (1, 0), (3, 1), (4, 1), (5, 2)]
        assert [(r.inner_steps, r.total_inner_steps) for r in reports] == [(3, 3), (2, 5)]

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_step_that_the_gradient_scaler_skips_is_none(self, lab, fused):
        """A fused optimizer is called nonetheless, and leaves the model as it is."""
        model = lab.small_model()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler, counted = torch.amp.GradScaler("cpu", init_scale=4.0), []
        with loop(None, model, inner)[2] as outer:
            for step in range(5):
                infinite = torch.inf if step in {1, 2} else 1.0
                scaler.scale(infinite * model(torch.ones(5, 3)).pow(2).mean()).backward()
                scaler.step(inner)
                scaler.update()
                inner.zero_grad()
                counted.append((outer.inner_steps, outer.committed))
        assert counted == [(1, 0), (1, 0), (1, 0), (2, 1), (3, 1)]

    @pytest.mark.sampled
    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("skipped", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
    def test_nobody_loses_a_step_after_one_that_was_skipped(self, skipped, to_none):
        """Later syncs still come between inner steps, not within one."""
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        three = [torch.optim.SGD([parameter], lr=1.0) for parameter in model]
        with loop(None, model, three, sync_every=1, **AVERAGING)[2] as outer:
            for step in range(8):
                for optimizer in three:
                    optimizer.zero_grad(set_to_none=to_none)
                model.zero_grad(set_to_none=to_none)
                torch.stack([parameter.sum() for parameter in model]).sum().backward()
                for number in (2, 0, 1):
                    if step != 3 or number not in skipped:
                        three[number].step()
            assert outer.inner_steps <= 8
        taken = [-parameter[0].item() for parameter in model]
        assert taken == [7.0 if number in skipped else 8.0 for number in range(3)]
        assert outer.inner_steps == 8

    @pytest.mark.parametrize("reaches", ["the second's", "the first's", "both"])
    @pytest.mark.parametrize("turned", [False, True])
    def test_each_has_a_backward_pass_of_its_own(self, reaches, turned):
        """As in a GAN: an iteration is one step, also where gradients are thrown away."""
        model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
        two = [torch.optim.SGD([parameter], lr=0.1) for parameter in model]
        reached = {"the second's": [{0}, {0, 1}], "the first's": [{0, 1}, {1}]}
        each = reached.get(reaches, [{0, 1}, {0, 1}])
        _, _, outer, reports = loop(None, model, two, sync_every=3)
        seen = []
        with outer:
            for _ in range(10):
                for number in (1, 0) if turned else (0, 1):
                    two[number].zero_grad()
                    sum(model[other].square().sum() for other in each[number]).backward()
                    two[number].step()
                seen.append(outer.inner_steps)
        assert seen == list(range(1, 11))
        assert [report.total_inner_steps for report in reports] == [3, 6, 9, 10]

    def test_a_partner_whose_gradients_are_set_to_zero_is_not_about_to_step(self, lab):
        """They stay the same tensors, to which the next backward pass adds."""
        model, (first, second), outer, _ = self.loop(lab, sync_every=4)
        with outer:
            for step in range(3):
                model(torch.ones(1, 3)).sum().backward()
                second.step()
                assert outer.inner_steps == step
                second.zero_grad(set_to_none=False)
                first.step()
                assert outer.inner_steps == step + 1

    def test_a_step_that_is_open_at_the_end_is_flushed(self, lab):
        model, two, outer, reports = self.loop(lab, sync_every=1)
        with outer:
            self.walk(model, two, (0, 1), (0,))
            moved = model.weight.detach().clone()
        assert [(r.inner_steps, r.total_inner_steps) for r in reports] == [(1, 1), (1, 2)]
        assert not torch.equal(model.weight, moved)

    def test_a_sync_within_a_step_counts_it(self, lab):
        """It holds what that step learned: an incarnation that begins there must not repeat it."""
        saved = []

        def on_sync(report):
            saved.append((report.total_inner_steps, outer.state_dict()["stepped"]))

        model, two, outer, _ = self.loop(lab, sync_every=1, on_sync=on_sync)
        with outer:
            self.walk(model, two, (0,), (0,), (0,))
            two[1].step()  # it comes after all, and still belongs to the last step
            assert saved == [(3, [])]
            assert outer.inner_steps == 3

    @pytest.mark.parametrize("idle", [0, 1])
    @pytest.mark.parametrize("until", [0, 4])  # one period and a step of the next one
    def test_one_that_does_not_step_any_more_is_waited_for_a_period_and_named_once(
        self, lab, caplog, idle, until
    ):
        model, two, outer, reports = self.loop(lab, sync_every=3)
        with outer:
            self.walk(model, two, *until * [(0, 1)], *(20 - until) * [(1 - idle,)])
            if not until:
                assert [r.total_inner_steps for r in reports] == [7, 14]
        assert sum(r.inner_steps for r in reports) == 20
        (record,) = [record for record in caplog.records if "waited for" in record.getMessage()]
        assert record.levelname == "WARNING"
        assert f"it waited for inner optimizer {idle} (SGD)" in record.message
        assert until or "after 3 inner steps and comes after 7" in record.message

    @pytest.mark.parametrize("pattern", [(0, 1), (0, 0, 1), (0, 1, 1), (1, 0, 0)])
    def test_ones_that_step_less_often_are_not_spoken_of(self, lab, caplog, pattern):
        model, two, outer, _ = self.loop(lab, sync_every=3)
        with outer:
            self.walk(model, two, *20 * [pattern])
        assert outer.committed >= 6
        assert "waited for" not in caplog.text

    def test_it_goes_on_in_the_middle_of_a_step(self, lab):
        model, two, outer, _ = self.loop(lab)
        with outer:
            self.walk(model, two, (0,))
            saved = copy.deepcopy(outer.state_dict())
        model, two = self.parts(lab)
        self.walk(model, two, (0,))
        outer = loop(None, model, two)[2]
        outer.load_state_dict(saved)
        with outer:
            two[1].step()
            assert outer.inner_steps == 1


def test_gradients_of_what_is_not_adopted_stay(lab):
    """Entering with a state that was loaded leaves the model as it is."""
    model, inner, outer, _ = loop()
    with outer:
        lab.push(model, inner, 0, 0)
        state = copy.deepcopy(outer.state_dict())
        gradient = model[0].weight.grad.clone()
        lab.push(model, inner, 0, 1)
        assert model[0].weight.grad is None
    model, inner, outer, _ = loop()
    lab.push(model, inner, 0, 0)
    outer = loop(None, model, inner)[2]
    outer.load_state_dict(state)
    with outer:
        assert torch.equal(model[0].weight.grad, gradient)


def test_what_is_no_inner_optimizer():
    model, inner, *_ = loop()
    kind = "inner_optimizer must be a torch.optim.Optimizer or a list of them, not "
    for wrong, message in [
        (None, f"{kind}None"),
        ([], "inner_optimizer is empty"),
        ([inner, "adam"], f"{kind}'adam'"),
        ([inner, inner], "inner_optimizer holds the same optimizer twice"),
        (model, kind),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            DiLoCo(model, wrong, in_process(1)[0], sync_every=1)
