"""How the loop counts, syncs, ends: the hook on the inner optimizer, gradients, flush, leaving by
an error.
"""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diloco_core._exchange._threads as threads
from diloco_core import (
    ConfigurationError,
    DiLoCo,
    NonFiniteDeltaError,
    ReplicaLostError,
    StoreExchange,
    SyncError,
    in_process,
    make_diloco_outer_loop,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


def pair(lab):
    return lab.fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def loop(lab, exchange, **options):
    """A model of two layers, its inner optimizer, its outer loop, and the list of reports."""
    model = pair(lab)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    reports = []
    return model, inner, DiLoCo(model, inner, exchange, on_sync=reports.append, **options), reports


class TestFlush:
    @pytest.mark.parametrize("fragments", [1, 2])
    @pytest.mark.parametrize("steps", [1, 3, 5, 7])
    @pytest.mark.parametrize("store", [False, True])
    def test_a_partial_period_is_synced_at_the_end(self, lab, tmp_path, fragments, steps, store):
        folder = [StoreExchange(open_store(str(tmp_path)), rank, 3) for rank in range(3)]
        options = {"sync_every": 4, "fragments": fragments, "outer_lr": 1.0, "outer_momentum": 0.0}
        runs = lab.train(
            lambda rank: pair(lab), folder if store else in_process(3), steps, **options
        )
        assert lab.identical(runs)
        # With averaging the model ends where the mean of all movements has taken it, so that no
        # step is left out.
        alone = [pair(lab) for _ in range(3)]
        for rank, model in enumerate(alone):
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            for step in range(steps):
                lab.push(model, inner, rank, step)
        for name, value in runs[0].items():
            mean = torch.stack([model.state_dict()[name] for model in alone]).mean(0)
            assert torch.allclose(value, mean, atol=1e-6)

    def test_nothing_is_flushed_when_nothing_is_open(self, lab):
        model, inner, outer, reports = loop(lab, in_process(1)[0], sync_every=2)
        with outer:
            assert outer.flush() == []
            for step in range(4):
                lab.push(model, inner, 0, step)
            assert outer.flush() == []
            held = lab.values(model)
        assert lab.identical([held, lab.values(model)])
        assert [(r.sync, r.inner_steps, r.total_inner_steps) for r in reports] == [
            (1, 2, 2),
            (2, 2, 4),
        ]

    def test_it_counts_the_steps_of_each_fragment(self, lab):
        model, inner, outer, reports = loop(lab, in_process(1)[0], sync_every=4, fragments=2)
        with outer:
            for step in range(5):
                lab.push(model, inner, 0, step)
        assert [(r.fragment, r.inner_steps) for r in reports] == [
            ("0", 2),
            ("1", 4),
            ("0", 3),
            ("1", 1),
        ]

    def test_in_the_middle_it_begins_a_new_period(self, lab):
        model, inner, outer, reports = loop(lab, in_process(1)[0], sync_every=3)
        with outer:
            for step in range(7):
                lab.push(model, inner, 0, step)
                if step == 3:
                    (report,) = outer.flush()
                    assert report is reports[-1]
        assert [r.total_inner_steps for r in reports] == [3, 4, 7]

    def test_leaving_by_an_exception_flushes_nothing(self, lab):
        model, inner, outer, reports = loop(lab, in_process(1)[0], sync_every=2)
        held = {}

        def fail():
            with outer:
                lab.push(model, inner, 0, 0)
                held.update(lab.values(model))
                raise KeyError("lost")

        with pytest.raises(KeyError, match="lost"):
            fail()
        assert reports == []
        assert lab.identical([held, lab.values(model)])

    def test_leaving_by_an_exception_tells_the_others(self, lab):
        """They do not wait for a contribution that will never come."""

        def replica(exchange):
            model, inner, outer, _ = loop(lab, exchange, sync_every=2)
            with outer:
                for step in range(4):
                    if exchange.rank == 1 and step == 3:
                        raise KeyError("the data is gone")
                    lab.push(model, inner, exchange.rank, step)

        runs = run_replicas(replica, in_process(3))
        assert isinstance(runs[1], KeyError)
        for survivor in (runs[0], runs[2]):
            assert isinstance(survivor, ReplicaLostError)
            assert "rank 1 failed after 1 sync: KeyError: 'the data is gone'" in str(survivor)

    def test_a_flush_that_fails_is_an_error_and_told(self, lab):
        def replica(exchange):
            model, inner, outer, _ = loop(lab, exchange, sync_every=5)
            with outer:
                lab.push(model, inner, exchange.rank, 0)
                if exchange.rank == 0:
                    model[1].weight.data[1, 0] = torch.nan

        first, second = run_replicas(replica, in_process(2))
        assert isinstance(first, NonFiniteDeltaError)
        assert first.tensor == "1.weight"
        assert isinstance(second, ReplicaLostError)


class TestCounting:
    def test_the_counters(self, lab):
        model, inner, outer, _ = loop(lab, in_process(1)[0], sync_every=6, fragments=2)
        seen = []
        with outer:
            for step in range(7):
                lab.push(model, inner, 0, step)
                seen.append((outer.inner_steps, outer.committed))
        assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2)]

    def test_micro_batches_are_no_steps(self, lab):
        """Backward passes do not count, only optimizer steps do."""
        model, inner, outer, reports = loop(lab, in_process(1)[0], sync_every=2)
        with outer:
            for _ in range(4):
                for _ in range(3):
                    model(torch.ones(1, 2)).sum().backward()
                inner.step()
                inner.zero_grad()
        assert [r.total_inner_steps for r in reports] == [2, 4]

    def test_a_step_that_the_gradient_scaler_skips_does_not_count(self, lab):
        model, inner, outer, _ = loop(lab, in_process(1)[0], sync_every=10)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with outer:
            for step in range(4):
                scaler.scale(model(torch.ones(1, 2)).sum()).backward()
                if step == 1:
                    model[0].weight.grad[0, 0] = torch.inf
                scaler.step(inner)
                scaler.update()
                inner.zero_grad()
            assert outer.inner_steps == 3

    def test_learning_rate_schedules_and_closures_count_once(self, lab):
        model, _, _, _ = loop(lab, in_process(1)[0], sync_every=1)
        inner = torch.optim.LBFGS(model.parameters(), max_iter=5)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)

        def closure():
            inner.zero_grad()
            value = model(torch.ones(1, 2)).square().sum()
            value.backward()
            return value

        with DiLoCo(model, inner, in_process(1)[0], sync_every=4) as outer:
            for _ in range(3):
                inner.step(closure)
                schedule.step()
            assert outer.inner_steps == 3

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_class_that_calls_its_parents_step_counts_once(self, lab, fails):
        """Torch calls the hooks for both; and none at the end of a step that raises."""

        class Warm(torch.optim.SGD):
            def step(self, closure=None):
                if self.param_groups[0]["lr"] < 0:
                    raise RuntimeError("out of memory")
                super().step(closure)

        class Warmer(Warm):
            def step(self, closure=None):
                super().step(closure)
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(
                        1.0
                    )  # belongs to the step, so it comes before the sync

        model = pair(lab)
        (
            torch.optim.SGD(model.parameters(), lr=1.0),
            Warm(model.parameters(), lr=1.0),
        )  # torch hooks a class at its first use
        inner = Warmer(model.parameters(), lr=1.0)
        reports = []
        with DiLoCo(model, inner, in_process(1)[0], sync_every=2, on_sync=reports.append) as outer:
            for step in range(4):
                if fails and step == 1:
                    inner.param_groups[0]["lr"] = -1.0
                    with pytest.raises(RuntimeError, match="out of memory"):
                        inner.step()
                    inner.param_groups[0]["lr"] = 1.0
                lab.push(model, inner, 0, step)
            assert outer.inner_steps == 4
            copy = outer.state_dict()["fragments"][0]["copy"][0]
            assert torch.equal(
                copy, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            )
        assert [r.total_inner_steps for r in reports] == [2, 4]

    def test_several_epochs_are_one_run(self, lab):
        """Periods run on over the ends of epochs: two epochs of five batches are ten steps."""
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(20, 2, generator=generator))

        def train(exchange, epochs, batches):
            model, inner, outer, reports = loop(lab, exchange, sync_every=4)
            with outer:
                for _ in range(epochs):
                    for (batch,) in batches:
                        model(batch + exchange.rank).square().mean().div(100).backward()
                        inner.step()
                        inner.zero_grad()
            return lab.values(model), [r.total_inner_steps for r in reports]

        loader = DataLoader(data, batch_size=4)
        twice = lab.run(lambda exchange: train(exchange, 2, loader), in_process(2))
        once = lab.run(lambda exchange: train(exchange, 1, [*loader, *loader]), in_process(2))
        assert lab.identical([held for held, _ in twice + once])
        assert [at for _, at in twice] == [[4, 8, 10]] * 2


@pytest.mark.processes
def test_nobody_trains_on_while_another_still_reads_its_values(lab, monkeypatch):
    """Between threads, what a replica publishes is its own memory, which its next steps change."""
    here, went_on = threading.local(), threading.Event()
    adopt = threads.adopt_shard

    def slow(*arguments):
        if getattr(here, "reads_slowly", False):
            assert not went_on.wait(0.2), (
                "the other replica has left the sync before this one has read its shard"
            )
        adopt(*arguments)

    monkeypatch.setattr(threads, "adopt_shard", slow)

    def replica(exchange):
        model, inner, outer, _ = loop(lab, exchange, sync_every=1)
        with outer:
            here.reads_slowly = exchange.rank == 1
            lab.push(model, inner, exchange.rank, 0)
            if exchange.rank == 0:
                went_on.set()

    lab.run(replica, in_process(2))


class TestEntering:
    def test_the_first_ranks_parameters_are_adopted(self, lab):
        def replica(exchange):
            model = lab.fill(nn.Linear(3, 3), seed=exchange.rank)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1):
                return lab.values(model)

        runs = lab.run(replica, in_process(3))
        assert lab.identical([*runs, lab.values(lab.fill(nn.Linear(3, 3), seed=0))])

    def test_steps_before_and_after_the_block_do_not_count(self, lab):
        model, inner, outer, _ = loop(lab, in_process(1)[0], sync_every=2)
        lab.push(model, inner, 0, 0)
        with outer:
            lab.push(model, inner, 0, 1)
        for step in range(2, 9):
            lab.push(model, inner, 0, step)
        assert outer.inner_steps == outer.committed == 1

    @pytest.mark.parametrize("several", [False, True])
    def test_forgetting_to_enter_is_noticed_after_one_period(self, lab, several):
        model = pair(lab)
        inner = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
        if not several:
            inner = [torch.optim.SGD(model.parameters(), lr=1.0)]
        DiLoCo(
            model, inner, in_process(1)[0], sync_every=3
        )  # nobody keeps it, as where hooks are thought to be enough
        for step in range(2):
            for optimizer in inner:
                lab.push(model, optimizer, 0, step)
        with pytest.raises(
            SyncError, match=r"3 inner steps were taken .* never entered.*with DiLoCo"
        ):
            lab.push(model, inner[0], 0, 2)

    def test_a_loop_that_is_made_anew_takes_the_place_of_one_that_was_never_entered(self, lab):
        model = pair(lab)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        first = DiLoCo(model, inner, in_process(1)[0], sync_every=1)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=2) as second:
            for step in range(4):
                lab.push(model, inner, 0, step)
            with pytest.raises(
                ConfigurationError,
                match="another outer loop is using this inner optimizer",
            ):
                DiLoCo(model, inner, in_process(1)[0], sync_every=1)
            with pytest.raises(
                ConfigurationError,
                match="another outer loop is using this inner optimizer",
            ):
                first.__enter__()
        assert (first.inner_steps, second.inner_steps) == (0, 4)
        with first:
            lab.push(model, inner, 0, 4)
        assert (first.inner_steps, second.inner_steps) == (1, 4)

    def test_a_loop_that_could_not_begin_does_not_count_on(self, lab):
        model, inner, outer, _ = loop(lab, in_process(1)[0], sync_every=1)
        outer.exchange.leave()
        with pytest.raises(SyncError):
            outer.__enter__()
        lab.push(model, inner, 0, 0)
        assert outer.inner_steps == 0

    def test_it_is_entered_once(self, lab):
        _, _, outer, _ = loop(lab, in_process(1)[0], sync_every=1)
        with outer:
            pass
        with pytest.raises(SyncError, match="entered already"):
            outer.__enter__()

    def test_gradients_of_what_was_synced_are_dropped(self, lab):
        """They belong to values that are gone; those of the other fragment stay."""
        model = pair(lab)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=2, fragments=list(model)):
            lab.push(model, inner, 0, 0)
            assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
            lab.push(model, inner, 0, 1)
            assert [p.grad is None for p in model.parameters()] == [False, False, True, True]

    def test_the_factory_has_the_usual_settings(self, lab, tmp_path, monkeypatch):
        """The environment says where to meet; settings are those of the paper."""
        monkeypatch.setenv("RENDEZVOUS_URI", str(tmp_path))
        monkeypatch.setenv("REPLICA_RANK", "0")
        monkeypatch.setenv("REPLICA_WORLD_SIZE", "1")
        made = []
        for build in (make_diloco_outer_loop, DiLoCo):
            model = pair(lab)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            options = (
                {}
                if build is make_diloco_outer_loop
                else {"exchange": in_process(1)[0], "sync_every": 500}
            )
            if build is DiLoCo:
                options["outer_optimizer"] = lambda p: torch.optim.SGD(
                    p, lr=0.7, momentum=0.9, nesterov=True
                )
            with build(model, inner, **options) as outer:
                for step in range(3):
                    lab.push(model, inner, 0, step)
                    outer.flush()
            made.append((outer, [p.detach() for p in model.parameters()]))
        assert made[0][0].sync_every == 500
        assert made[0][0].exchange.ended
        for ours, theirs in zip(made[0][1], made[1][1], strict=True):
            assert torch.allclose(ours, theirs)
