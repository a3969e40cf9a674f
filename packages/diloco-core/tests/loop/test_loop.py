"""Test how the loop counts, syncs and ends."""

import threading

import pytest
import torch
from loop_lab import live, loop
from torch import nn

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    NonFiniteDeltaError,
    ReplicaLostError,
    SyncError,
    in_process,
    make_diloco_outer_loop,
)
from diloco_core.testing import run_replicas


class TestFlush:
    def test_nothing_is_flushed_when_nothing_is_open(self, lab):
        model, inner, outer, reports = loop()
        with outer:
            assert outer.flush() == []
            for step in range(4):
                lab.push(model, inner, 0, step)
            assert outer.flush() == []
            held = lab.values(model)
        assert lab.identical([held, lab.values(model)])
        counted = [(r.sync, r.inner_steps, r.total_inner_steps) for r in reports]
        assert counted == [(1, 2, 2), (2, 2, 4)]

    def test_it_counts_the_steps_of_each_fragment(self):
        model, inner, outer, reports = loop(sync_every=4, fragments=2)
        live(model, inner, outer, *range(5))
        counted = [(report.fragment, report.inner_steps) for report in reports]
        assert counted == [("0", 2), ("1", 4), ("0", 3), ("1", 1)]

    def test_in_the_middle_it_begins_a_new_period(self, lab):
        model, inner, outer, reports = loop(sync_every=3)
        with outer:
            for step in range(7):
                lab.push(model, inner, 0, step)
                if step == 3:
                    (report,) = outer.flush()
                    assert report is reports[-1]
        assert [r.total_inner_steps for r in reports] == [3, 4, 7]

    def test_leaving_by_an_exception_flushes_nothing(self, lab):
        model, inner, outer, reports = loop()
        before = []

        def fail(model):
            before.append(lab.values(model))
            raise KeyError("the data is gone")

        with pytest.raises(KeyError):
            live(model, inner, outer, 0, 1, 2, fail)
        assert len(reports) == 1
        assert lab.identical([*before, lab.values(model)])

    def test_a_flush_that_fails_is_an_error_and_told(self, lab):
        def replica(exchange):
            model, inner, outer, _ = loop(exchange, sync_every=5)
            with outer:
                lab.push(model, inner, exchange.rank, 0)
                if exchange.rank == 0:
                    model[1].weight.data[1, 0] = torch.nan

        first, second = run_replicas(replica, in_process(2))
        assert isinstance(first, NonFiniteDeltaError)
        assert first.tensor == "1.weight"
        assert isinstance(second, ReplicaLostError)


class TestCounting:
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
                # Belongs to the step, so it comes before the sync.
                self.param_groups[0]["params"][0].data.add_(1.0)

        model = loop()[0]
        # torch hooks a class at its first use
        torch.optim.SGD(model.parameters(), lr=1.0), Warm(model.parameters(), lr=1.0)
        inner = Warmer(model.parameters(), lr=1.0)
        model, inner, outer, reports = loop(None, model, inner)
        with outer:
            for step in range(4):
                if fails and step == 1:
                    inner.param_groups[0]["lr"] = -1.0
                    with pytest.raises(RuntimeError, match="out of memory"):
                        inner.step()
                    inner.param_groups[0]["lr"] = 1.0
                lab.push(model, inner, 0, step)
            assert outer.inner_steps == 4
            copy = outer.state_dict()["fragments"][0]["copy"][0]
            assert torch.equal(copy, nn.utils.parameters_to_vector(model.parameters()))
        assert [r.total_inner_steps for r in reports] == [2, 4]


@pytest.mark.processes
def test_nobody_trains_on_while_another_still_reads_its_values(lab):
    """Between threads, what a replica publishes is its own memory, which its next steps change."""
    went_on, first, second = threading.Event(), *in_process(2)
    begin = first.begin

    def slowly_read(job, **given):
        published, own = job.published, threading.current_thread()

        def slow(piece):
            if threading.current_thread() is not own:
                assert not went_on.wait(0.2), "it has left the sync before its shard was read"
            return published(piece)

        job.published = slow
        return begin(job, **given)

    def replica(exchange):
        model, inner, outer, _ = loop(exchange, sync_every=1)
        with outer:
            lab.push(model, inner, exchange.rank, 0)
            if exchange.rank == 0:
                went_on.set()

    first.begin = slowly_read
    lab.run(replica, [first, second])


class TestEntering:
    def test_steps_before_and_after_the_block_do_not_count(self, lab):
        model, inner, outer, _ = loop()
        lab.push(model, inner, 0, 0)
        with outer:
            lab.push(model, inner, 0, 1)
        for step in range(2, 9):
            lab.push(model, inner, 0, step)
        assert outer.inner_steps == outer.committed == 1

    @pytest.mark.parametrize("several", [False, True])
    def test_forgetting_to_enter_is_noticed_after_one_period(self, lab, several):
        model = loop()[0]
        parts = model if several else [model]
        inner = [torch.optim.SGD(part.parameters(), lr=1.0) for part in parts]
        # Nobody keeps it, as where hooks are thought to be enough.
        DiLoCo(model, inner, in_process(1)[0], sync_every=3)
        for step in range(2):
            for optimizer in inner:
                lab.push(model, optimizer, 0, step)
        text = r"3 inner steps were taken .* never entered.*with DiLoCo"
        with pytest.raises(SyncError, match=text):
            lab.push(model, inner[0], 0, 2)

    def test_a_loop_that_is_made_anew_takes_the_place_of_one_that_was_never_entered(self, lab):
        model, inner, first, _ = loop(sync_every=1)
        text = "another outer loop is using this inner optimizer"
        with loop(None, model, inner)[2] as second:
            for step in range(4):
                lab.push(model, inner, 0, step)
            for again in (lambda: loop(None, model, inner), first.__enter__):
                with pytest.raises(ConfigurationError, match=text):
                    again()
        assert (first.inner_steps, second.inner_steps) == (0, 4)
        with first:
            lab.push(model, inner, 0, 4)
        assert (first.inner_steps, second.inner_steps) == (1, 4)

    def test_a_loop_that_could_not_begin_does_not_count_on(self, lab):
        model, inner, outer, _ = loop(sync_every=1)
        outer.exchange.leave()
        with pytest.raises(SyncError):
            outer.__enter__()
        lab.push(model, inner, 0, 0)
        assert outer.inner_steps == 0

    def test_it_is_entered_once(self):
        outer = loop()[2]
        with outer:
            pass
        with pytest.raises(SyncError, match="entered already"):
            outer.__enter__()

    def test_gradients_of_what_was_synced_are_dropped(self, lab):
        """They belong to values that are gone; those of the other fragment stay."""
        model = loop()[0]
        model, inner, outer, _ = loop(None, model, fragments=list(model))
        with outer:
            lab.push(model, inner, 0, 0)
            assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
            lab.push(model, inner, 0, 1)
            assert [p.grad is None for p in model.parameters()] == [False, False, True, True]

    def test_the_factory_has_the_usual_settings(self, tmp_path, monkeypatch):
        """The environment says where to meet; settings are those of the paper."""
        monkeypatch.setenv("RENDEZVOUS_URI", str(tmp_path))
        monkeypatch.setenv("REPLICA_RANK", "0")
        monkeypatch.setenv("REPLICA_WORLD_SIZE", "1")

        model = loop()[0]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = make_diloco_outer_loop(model, inner)
        assert outer.sync_every == 500
        live(model, inner, outer, 0, 1)
        assert outer.exchange.ended
        settings = outer.state_dict()["settings"]
        found = [settings[f"outer_{name}"] for name in ("lr", "momentum", "nesterov")]
        assert found == ["0.7", "0.9", "True"]
