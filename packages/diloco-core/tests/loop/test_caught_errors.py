"""Errors that user code catches, and memory afterwards."""

import gc
import weakref

import pytest
import torch
from loop_lab import loop
from torch import nn
from training_lab import fill

from diloco_core import NonFiniteUpdateError, SyncError, connect, in_process
from diloco_core.testing import run_replicas


class TestASyncThatHasFailed:
    """In fp16 the outer step of the last bias overflows, after the first ones were adopted."""

    def half(self, exchange=None, **options):
        model = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half())
        exchange = exchange or in_process(1, chunk_bytes=16)[0]
        return loop(exchange, model, sync_every=1, **options)

    def fail(self, model, inner):
        for distance in (60000.0, 65000.0):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model[1].bias.data.fill_(-distance)
            model[1].bias.grad.zero_()
            inner.step()

    @pytest.mark.parametrize("flush", ["partial", "none"])
    def test_whoever_catches_it_does_not_leave_as_if_all_were_well(self, flush):
        caught = []

        def replica(exchange):
            model, inner, outer, _ = self.half(exchange, flush=flush)
            with outer:
                try:
                    self.fail(model, inner)
                except SyncError as error:
                    caught.append(error)

        results = run_replicas(replica, in_process(2, chunk_bytes=16))
        assert len(caught) == 2
        assert any(isinstance(error, NonFiniteUpdateError) for error in caught)
        for result in results:
            assert isinstance(result, SyncError)
            assert "an earlier sync of this outer loop has failed" in str(result)

    def test_it_can_neither_be_saved_nor_gone_on_with(self, lab):
        model, inner, outer, _ = self.half()
        outer.__enter__()
        with pytest.raises(NonFiniteUpdateError):
            self.fail(model, inner)
        text = r"undefined.*The error was NonFiniteUpdateError: in sync"
        for use in (outer.state_dict, outer.flush, lambda: lab.push(model, inner, 0, 0)):
            with pytest.raises(SyncError, match=text):
                use()
        with pytest.raises(SyncError, match="undefined"):
            outer.__exit__(None, None, None)

    @pytest.mark.parametrize("options", [{}, {"min_replicas": 1}])
    def test_so_it_is_where_it_was_interrupted_before_it_was_counted(self, lab, tmp_path, options):
        """Ctrl-C when the exchange is through with a sync, and the loop has not counted it yet."""
        exchange = connect(tmp_path, rank=0, world_size=1, **options)
        begin = exchange.begin

        def interrupted(job, **given):
            pending = begin(job, **given)
            finish = pending.finish

            def stop():
                finish()
                raise KeyboardInterrupt

            pending.finish = stop
            return pending

        model, inner, outer, _ = loop(exchange, sync_every=1)
        outer.__enter__()
        exchange.begin = interrupted
        with pytest.raises(KeyboardInterrupt):
            lab.push(model, inner, 0, 0)
        exchange.begin = begin
        with pytest.raises(SyncError, match="undefined"):
            lab.push(model, inner, 0, 1)
        with pytest.raises(SyncError, match="undefined"):
            outer.__exit__(None, None, None)

    def test_an_error_of_on_sync_comes_after_a_sync_that_is_whole(self, lab):
        def stop(report):
            raise KeyError(report.sync)

        model, inner, outer, _ = loop(on_sync=stop, sync_every=1)
        with outer:
            with pytest.raises(KeyError):
                lab.push(model, inner, 0, 0)
            outer.state_dict()
        assert outer.committed == 1


@pytest.mark.parametrize("entered", [False, True])
def test_nothing_holds_on_to_a_loop_that_is_over(lab, entered):
    def live():
        model, inner, outer, _ = loop(sync_every=1)
        if entered:
            with outer:
                lab.push(model, inner, 0, 0)
        return [weakref.ref(thing) for thing in (model, inner, outer, model[0].weight)]

    left = live()
    gc.collect()
    assert [ref() for ref in left] == [None] * 4


@pytest.mark.sampled
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("options", [{}, {"min_replicas": 1}])
def test_a_connection_that_has_ended_lets_go_of_the_model(lab, tmp_path, options, failed):
    def live():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
        exchange = connect(tmp_path, rank=0, world_size=1, **options)
        model, inner, outer, _ = loop(exchange, model, sync_every=1)
        try:
            with outer:
                lab.push(model, inner, 0, 0)
                if failed:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        held = (exchange, model, model[0].weight, model[1].weight)
        return [weakref.ref(thing) for thing in held]

    left = live()
    gc.collect()
    assert [ref() for ref in left] == [None] * 4
