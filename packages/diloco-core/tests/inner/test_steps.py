"""When a step counts: laws of the counter, and several inner optimizers around one model."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, in_process
from diloco_core._inner._steps import StepCounter

sequences = st.integers(1, 3).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count - 1), max_size=30))
)


def counted(count, sequence):
    """How many inner steps each step of an optimizer ends: before it and after it; and whether one
    is open at the end.
    """
    counter = StepCounter(count)
    ends = [(counter.before(optimizer), counter.after(optimizer)) for optimizer in sequence]
    return ends, counter


class TestTheCounter:
    @given(sequences)
    @settings(deadline=None)
    def test_inner_steps_are_runs_without_a_repetition_and_end_when_complete(self, case):
        count, sequence = case
        ends, counter = counted(count, sequence)
        blocks, block = [], []
        for number, optimizer in enumerate(sequence):
            if optimizer in block:
                blocks.append(block)
                block = []
                assert ends[number][0], "the step before was over"
            else:
                assert not ends[number][0]
            block.append(optimizer)
            assert ends[number][1] == (len(block) == count)
            if len(block) == count:
                blocks.append(block)
                block = []
        assert counter.stepped == sorted(block)
        assert sum(before + after for before, after in ends) == len(blocks)
        assert counter.end() == bool(block)
        assert not counter.end()

    @given(sequences)
    @settings(deadline=None)
    def test_no_step_is_lost_and_none_counts_twice(self, case):
        count, sequence = case
        ends, counter = counted(count, sequence)
        total = sum(before + after for before, after in ends) + counter.end()
        most = max((sequence.count(optimizer) for optimizer in range(count)), default=0)
        assert most <= total <= len(sequence)

    @given(
        st.integers(1, 3).flatmap(
            lambda count: st.lists(st.permutations(range(count)), max_size=10)
        )
    )
    @settings(deadline=None)
    def test_where_all_step_each_time_the_order_is_of_no_importance(self, rounds):
        sequence = [optimizer for order in rounds for optimizer in order]
        ends, counter = counted(max([*sequence, 0]) + 1, sequence)
        assert not any(before for before, _ in ends)
        assert sum(after for _, after in ends) == len(rounds)
        assert counter.stepped == []

    @given(sequences, st.integers(0, 30))
    @settings(deadline=None)
    def test_a_step_that_is_counted_early_counts_once(self, case, cut):
        count, sequence = case
        ends, counter = counted(count, sequence[:cut])
        early = counter.count_early()
        assert not counter.count_early()
        assert counter.stepped == []
        ends += [(counter.before(number), counter.after(number)) for number in sequence[cut:]]
        total = sum(before + after for before, after in ends) + early + counter.end()
        ends, counter = counted(count, sequence)
        assert total == sum(before + after for before, after in ends) + counter.end()

    @given(sequences, st.integers(0, 30))
    @settings(deadline=None)
    def test_it_can_be_saved_at_any_time(self, case, cut):
        count, sequence = case
        first, counter = counted(count, sequence[:cut])
        again = StepCounter(count)
        again.load(counter.stepped)
        second = [(again.before(optimizer), again.after(optimizer)) for optimizer in sequence[cut:]]
        assert first + second == counted(count, sequence)[0]


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
        """The step counts when the other one is about to step again; a sync that is due waits for
        the step under way.
        """
        model, (first, second) = self.parts(lab)
        reports = []
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with DiLoCo(
            model, [first, second], in_process(1)[0], sync_every=2, on_sync=reports.append
        ) as outer:
            seen = []
            for step in range(5):
                self.gradients(model, 0, step)
                scaler.scale(torch.ones(1))
                if step == 1:
                    model.bias.grad[0] = torch.inf
                for optimizer in (first, second):
                    scaler.step(optimizer)
                    assert optimizer is second or model.bias.grad is not None, (
                        "the second one's step is still to come"
                    )
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
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        (exchange,) = in_process(1)
        counted = []
        with DiLoCo(model, inner, exchange, sync_every=2) as outer:
            for step in range(5):
                infinite = torch.inf if step in {1, 2} else 1.0
                scaler.scale(infinite * model(torch.ones(5, 3)).pow(2).mean()).backward()
                scaler.step(inner)
                scaler.update()
                inner.zero_grad()
                counted.append((outer.inner_steps, outer.committed))
        assert counted == [(1, 0), (1, 0), (1, 0), (2, 1), (3, 1)]

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
    @pytest.mark.parametrize("skipped", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
    def test_nobody_loses_a_step_after_one_that_was_skipped(self, lab, skipped, order, to_none):
        """Whichever partner was skipped once, later syncs still come between inner steps, not
        within one.
        """
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        three = [torch.optim.SGD([parameter], lr=1.0) for parameter in model]
        options = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
        with DiLoCo(model, three, in_process(1)[0], **options) as outer:
            for step in range(8):
                for optimizer in three:
                    optimizer.zero_grad(set_to_none=to_none)
                model.zero_grad(set_to_none=to_none)
                torch.stack([parameter.sum() for parameter in model]).sum().backward()
                for number in order:
                    if step != 3 or number not in skipped:
                        three[number].step()
            assert outer.inner_steps <= 8
        taken = [-parameter[0].item() for parameter in model]
        assert taken == [7.0 if number in skipped else 8.0 for number in range(3)]
        assert outer.inner_steps == 8

    @pytest.mark.parametrize("reaches", ["the second's", "the first's", "both"])
    @pytest.mark.parametrize("turned", [False, True])
    def test_each_has_a_backward_pass_of_its_own(self, reaches, turned):
        """As in a GAN: an iteration is one step, also where a pass leaves gradients for the other
        one, which it throws away.
        """
        model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
        two = [torch.optim.SGD([parameter], lr=0.1) for parameter in model]
        reached = {"the second's": [{0}, {0, 1}], "the first's": [{0, 1}, {1}]}
        each = reached.get(reaches, [{0, 1}, {0, 1}])
        reports, seen = [], []
        (exchange,) = in_process(1)
        with DiLoCo(model, two, exchange, sync_every=3, on_sync=reports.append) as outer:
            for _ in range(10):
                for number in (1, 0) if turned else (0, 1):
                    two[number].zero_grad()
                    sum(model[other].square().sum() for other in each[number]).backward()
                    two[number].step()
                seen.append(outer.inner_steps)
        assert seen == list(range(1, 11))
        assert [report.total_inner_steps for report in reports] == [3, 6, 9, 10]

    def test_a_partner_whose_gradients_are_set_to_zero_is_not_about_to_step(self, lab):
        model, (first, second) = self.parts(lab)
        with DiLoCo(model, [first, second], in_process(1)[0], sync_every=4) as outer:
            for step in range(3):
                self.gradients(model, 0, step)
                second.step()
                second.zero_grad(set_to_none=False)
                first.step()
                assert outer.inner_steps == step + 1

    def test_a_step_that_is_open_at_the_end_is_flushed(self, lab):
        model, (first, second) = self.parts(lab)
        reports = []
        with DiLoCo(model, [first, second], in_process(1)[0], sync_every=1, on_sync=reports.append):
            self.gradients(model, 0, 0)
            first.step(), second.step()
            self.gradients(model, 0, 1)
            first.step()
            moved = model.weight.detach().clone()
        assert [(r.inner_steps, r.total_inner_steps) for r in reports] == [(1, 1), (1, 2)]
        assert not torch.equal(model.weight, moved)

    def test_a_partner_that_never_steps_again_does_not_stop_the_syncs(self, lab):
        """They wait for it one period at most."""
        model, (first, _) = self.parts(lab)
        reports = []
        with DiLoCo(
            model,
            [first, torch.optim.SGD([model.bias])],
            in_process(1)[0],
            sync_every=3,
            on_sync=reports.append,
        ):
            for step in range(20):
                self.gradients(model, 0, step)
                first.step()
            assert [r.total_inner_steps for r in reports] == [7, 14]
        assert sum(r.inner_steps for r in reports) == 20

    def test_a_sync_within_a_step_counts_it(self, lab):
        """It holds what that step learned: an incarnation that begins there must not repeat it."""
        model, two = self.parts(lab)
        saved = []

        def on_sync(report):
            saved.append((report.total_inner_steps, outer.state_dict()["stepped"]))

        (exchange,) = in_process(1)
        with DiLoCo(model, two, exchange, sync_every=1, on_sync=on_sync) as outer:
            for step in range(3):
                self.gradients(model, 0, step)
                two[0].step()
            two[1].step()  # it comes after all, and still belongs to the last step
            assert saved == [(3, [])]
            assert outer.inner_steps == 3

    @pytest.mark.parametrize("idle", [0, 1])
    def test_one_that_does_not_step_is_named_once(self, lab, caplog, idle):
        model, two = self.parts(lab)
        with DiLoCo(model, two, in_process(1)[0], sync_every=3):
            for step in range(20):
                self.gradients(model, 0, step)
                two[1 - idle].step()
        (record,) = [record for record in caplog.records if "waited for" in record.getMessage()]
        assert record.levelname == "WARNING"
        assert (
            f"after 3 inner steps and comes after 7, because it waited for inner optimizer {idle} "
            "(SGD)," in record.message
        )

    def test_one_that_does_not_step_any_more_is_named(self, lab, caplog):
        model, two = self.parts(lab)
        with DiLoCo(model, two, in_process(1)[0], sync_every=3):
            for step in range(20):
                self.gradients(model, 0, step)
                two[0].step()
                if step < 4:  # one period and a step of the next one
                    two[1].step()
        (record,) = [record for record in caplog.records if "waited for" in record.getMessage()]
        assert "it waited for inner optimizer 1 (SGD)" in record.message

    @pytest.mark.parametrize("pattern", [(0, 1), (0, 0, 1), (0, 1, 1), (1, 0, 0)])
    def test_ones_that_step_less_often_are_not_spoken_of(self, lab, caplog, pattern):
        model, two = self.parts(lab)
        with DiLoCo(model, two, in_process(1)[0], sync_every=3) as outer:
            for step in range(20):
                self.gradients(model, 0, step)
                for number in pattern:
                    two[number].step()
        assert outer.committed >= 6
        assert "waited for" not in caplog.text

    def test_it_goes_on_in_the_middle_of_a_step(self, lab):
        model, two = self.parts(lab)
        saved = []
        with DiLoCo(model, two, in_process(1)[0], sync_every=2) as outer:
            self.gradients(model, 0, 0)
            two[0].step()
            saved.append(copy.deepcopy(outer.state_dict()))
        model, two = self.parts(lab)
        self.gradients(model, 0, 0)
        two[0].step()
        outer = DiLoCo(model, two, in_process(1)[0], sync_every=2)
        outer.load_state_dict(saved[0])
        with outer:
            two[1].step()
            assert outer.inner_steps == 1


class TestGradients:
    def test_of_what_is_not_adopted_they_stay(self, lab):
        """Entering with a state that was loaded leaves the model as it is."""
        model = lab.fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=2) as outer:
            lab.push(model, inner, 0, 0)
            state = copy.deepcopy(outer.state_dict())
            gradient = model.weight.grad.clone()
            lab.push(model, inner, 0, 1)
            assert model.weight.grad is None
        again = lab.fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(again.parameters(), lr=1.0)
        lab.push(again, inner, 0, 0)
        outer = DiLoCo(again, inner, in_process(1)[0], sync_every=2)
        outer.load_state_dict(state)
        with outer:
            assert torch.equal(again.weight.grad, gradient)


class TestRefusals:
    def test_optimizers(self, lab):
        model = lab.fill(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        for wrong, message in [
            (None, "inner_optimizer must be a torch.optim.Optimizer or a list of them, not None"),
            ([], "inner_optimizer is empty"),
            (
                [inner, "adam"],
                "inner_optimizer must be a torch.optim.Optimizer or a list of them, not 'adam'",
            ),
            ([inner, inner], "inner_optimizer holds the same optimizer twice"),
            (model, "inner_optimizer must be a torch.optim.Optimizer"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                DiLoCo(model, wrong, in_process(1)[0], sync_every=1)
