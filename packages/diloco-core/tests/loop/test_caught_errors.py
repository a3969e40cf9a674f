"""Errors that user code catches, state that is not there yet, and memory afterwards."""

import gc
import weakref

import pytest
import torch
from torch import nn

from diloco_core import DiLoCo, NonFiniteUpdateError, SyncError, connect, in_process
from diloco_core.testing import run_replicas


def parts(lab, exchange, dtype=torch.float32, **options):
    model = lab.fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, inner, DiLoCo(model, inner, exchange, **{"sync_every": 1, **options})


def interrupted_after(outer):
    """Ctrl-C when the exchange is through with a sync, and the loop has not counted it yet."""
    begin, adopted = outer._exchange.begin, []

    class Noticed:
        def __init__(self, *args, **options):
            self.pending = begin(*args, **options)

        def finish(self):
            adopted.append(self.pending.finish())
            return adopted[-1]

    outer._exchange.begin = Noticed

    def seen():
        if adopted:
            raise KeyboardInterrupt

    return seen


class TestASyncThatHasFailed:
    """In fp16 the outer step of the last bias overflows, after the first ones were adopted."""

    def fail(self, lab, outer, model, inner):
        for distance in (60000.0, 65000.0):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model[1].bias.data.fill_(-distance)
            model[1].bias.grad.zero_()
            inner.step()

    @pytest.mark.parametrize("flush", ["partial", "none"])
    def test_whoever_catches_it_does_not_leave_as_if_all_were_well(self, lab, flush):
        caught = []

        def replica(exchange):
            model, inner, outer = parts(lab, exchange, torch.float16, flush=flush)
            with outer:
                try:
                    self.fail(lab, outer, model, inner)
                except SyncError as error:
                    caught.append(error)

        results = run_replicas(replica, in_process(2, chunk_bytes=16))
        assert len(caught) == 2
        assert any(isinstance(error, NonFiniteUpdateError) for error in caught)
        for result in results:
            assert isinstance(result, SyncError)
            assert "an earlier sync of this outer loop has failed" in str(result)

    def test_it_can_neither_be_saved_nor_gone_on_with(self, lab):
        model, inner, outer = parts(lab, in_process(1, chunk_bytes=16)[0], torch.float16)
        outer.__enter__()
        with pytest.raises(NonFiniteUpdateError):
            self.fail(lab, outer, model, inner)
        for use in (outer.state_dict, outer.flush, lambda: lab.push(model, inner, 0, 0)):
            with pytest.raises(
                SyncError, match=r"undefined.*The error was NonFiniteUpdateError: in sync"
            ):
                use()
        with pytest.raises(SyncError, match="undefined"):
            outer.__exit__(None, None, None)

    @pytest.mark.parametrize("options", [{}, {"min_replicas": 1}])
    def test_so_it_is_where_it_was_interrupted_before_it_was_counted(
        self, lab, tmp_path, monkeypatch, options
    ):
        """The model had taken a step that no counter knew of."""
        model, inner, outer = parts(lab, connect(tmp_path, rank=0, world_size=1, **options))
        outer.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(outer._outer_steps, "adopted", interrupted_after(outer))
            with pytest.raises(KeyboardInterrupt):
                lab.push(model, inner, 0, 0)
        with pytest.raises(SyncError, match="undefined"):
            lab.push(model, inner, 0, 1)
        with pytest.raises(SyncError, match="undefined"):
            outer.__exit__(None, None, None)

    def test_an_error_of_on_sync_comes_after_a_sync_that_is_whole(self, lab):
        def stop(report):
            raise KeyError(report.sync)

        model, inner, outer = parts(lab, in_process(1)[0], on_sync=stop)
        with outer:
            with pytest.raises(KeyError):
                lab.push(model, inner, 0, 0)
            outer.state_dict()
        assert outer.committed == 1


def test_before_the_block_is_entered_there_is_no_state(lab):
    _, _, outer = parts(lab, in_process(1)[0])
    with pytest.raises(SyncError, match="no state yet"):
        outer.state_dict()


class TestMemory:
    @pytest.mark.parametrize("entered", [False, True])
    def test_nothing_holds_on_to_a_loop_that_is_over(self, lab, entered):
        def live():
            model, inner, outer = parts(lab, in_process(1)[0])
            if entered:
                with outer:
                    lab.push(model, inner, 0, 0)
            return [weakref.ref(thing) for thing in (model, inner, outer, model[0].weight)]

        left = live()
        gc.collect()
        assert [ref() for ref in left] == [None] * 4

    @pytest.mark.parametrize("failed", [False, True])
    @pytest.mark.parametrize("options", [{}, {"min_replicas": 1}])
    def test_a_connection_that_has_ended_lets_go_of_the_model(self, lab, tmp_path, options, failed):
        def live():
            model = lab.fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)))
            inner = torch.optim.SGD(model[0].parameters(), lr=1.0)
            exchange = connect(tmp_path, rank=0, world_size=1, **options)
            try:
                with DiLoCo(model, inner, exchange, sync_every=1):
                    lab.push(model, inner, 0, 0)
                    if failed:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            return [
                weakref.ref(thing) for thing in (exchange, model, model[0].weight, model[1].weight)
            ]

        left = live()
        gc.collect()
        assert [ref() for ref in left] == [None] * 4

    def test_a_loop_that_was_never_entered_gives_way_to_the_next(self, lab):
        model, inner, first = parts(lab, in_process(1)[0])
        second = DiLoCo(model, inner, in_process(1)[0], sync_every=1)
        with second:
            lab.push(model, inner, 0, 0)
        assert (first.committed, second.committed) == (0, 1)
