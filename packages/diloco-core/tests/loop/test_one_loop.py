"""A tensor, an exchange and a process belong to one outer loop at a time."""

import gc
import multiprocessing
import os
from dataclasses import replace

import pytest
import torch
from loop_lab import Net, loop
from torch import nn

from diloco_core import ConfigurationError, ModelChangedError, SyncError, connect, in_process


class TestTensors:
    """Two loops around one model would change each other's results, whatever their optimizers."""

    MESSAGE = r"another outer loop in use also holds '{}', and at least one of the two syncs it"

    def outer(self, model, **options):
        return loop(None, model, **{"sync_every": 1, **options})[2]

    def test_a_second_one_around_the_same_model_is_refused(self, lab):
        early = self.outer(model := lab.fill(Net()))
        _, inner, outer, _ = loop(None, model, sync_every=1)
        with outer:
            for again in (early.__enter__, lambda: self.outer(model)):
                with pytest.raises(ConfigurationError, match=self.MESSAGE.format("[a-z.]+")):
                    again()
            with pytest.raises(ConfigurationError, match=self.MESSAGE.format("weight")):
                self.outer(model.head)
            lab.push(model, inner, 0, 0)
        assert outer.committed == 1
        with early:
            pass

    def test_so_is_one_that_trains_what_the_other_keeps_frozen(self, lab):
        frozen = self.outer(model := lab.fill(Net()))
        model.base.requires_grad_(True)
        pair = lambda: nn.Sequential(model.base, nn.Linear(3, 2))  # noqa: E731
        trained, later = self.outer(pair()), self.outer(pair())
        with trained, pytest.raises(ConfigurationError, match=self.MESSAGE.format("base.weight")):
            frozen.__enter__()
        model.base.requires_grad_(False)
        with frozen, pytest.raises(ConfigurationError, match=self.MESSAGE.format("0.weight")):
            later.__enter__()

    @pytest.mark.parametrize("buffers", ["mean", "none"])
    def test_memory_decides_and_so_do_buffers(self, lab, buffers):
        model, other = lab.fill(Net()), lab.fill(Net())
        with self.outer(model, buffers=buffers):
            other.body.weight.data = model.body.weight.data
            with pytest.raises(ConfigurationError, match=self.MESSAGE.format("body.weight")):
                self.outer(other)
            other = lab.fill(Net())
            other.mean = model.mean = torch.zeros(3)
            with pytest.raises(ConfigurationError, match=self.MESSAGE.format("mean")):
                self.outer(other)

    def test_what_both_keep_frozen_may_be_shared_and_so_may_storage_that_is_apart(self, lab):
        flat = torch.zeros(24)
        first, second = lab.fill(Net()), lab.fill(Net())
        second.base = first.base
        first.body.weight.data, second.body.weight.data = flat[:9].view(3, 3), flat[9:18].view(3, 3)
        with self.outer(first), self.outer(second):
            pass

    @pytest.mark.sampled
    @pytest.mark.parametrize("how", ["failed in the block", "failed at the start", "forgotten"])
    def test_one_that_is_over_is_in_nobodys_way(self, lab, how):
        outer = self.outer(model := lab.fill(Net()))
        if how == "failed at the start":
            model.base.requires_grad_(True)
            with pytest.raises(ModelChangedError):
                outer.__enter__()
            model.base.requires_grad_(False)
        elif how == "forgotten":
            outer.__enter__()
            del outer
            gc.collect()
        else:
            with pytest.raises(ZeroDivisionError), outer:
                raise ZeroDivisionError
        with self.outer(model):
            pass


def test_two_loops_over_one_exchange(lab, tmp_path):
    """Another replica might step models that look alike in another order."""
    (exchange,) = in_process(1)
    (model, inner, outer, _), (_, _, other, _) = loop(exchange), loop(exchange)
    with outer:
        with pytest.raises(ConfigurationError, match="this exchange is in use by another outer lo"):
            loop(exchange)
        with pytest.raises(ConfigurationError, match="connect to another prefix"):
            other.__enter__()
        lab.push(model, inner, 0, 0)
    first, second = (connect(str(tmp_path), rank=0, world_size=1) for _ in range(2))
    with loop(first)[2], pytest.raises(ConfigurationError, match="returns the same exchange"):
        loop(second)


def in_child(outer, inner, act, answers):
    try:
        if act == "exit":
            error = SystemExit(0)
            outer.__exit__(type(error), error, None)
        else:
            {
                # Without a backward pass, which torch refuses after a fork where there is a GPU
                "step": inner.step,
                "leave": lambda: outer.__exit__(None, None, None),
                "flush": outer.flush,
                "state": outer.state_dict,
            }[act]()
        answers.send("nothing")
    except BaseException as error:
        answers.send(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.sampled
@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform"
)
@pytest.mark.parametrize("min_replicas", [None, 1])
@pytest.mark.parametrize("act", ["step", "leave", "flush", "state", "exit"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_does_nothing_in_the_name_of_its_parent(lab, tmp_path, act, min_replicas):
    """On a folder, where nothing else would keep it from that."""

    def objects():
        return sorted(path for path in tmp_path.rglob("*") if "beats" not in path.parts)

    net = lab.small_model()
    exchange = connect(str(tmp_path), rank=0, world_size=1, min_replicas=min_replicas)
    outer, inner = lab.outer_loop(net, exchange, sync_every=3)  # the child's step makes none due
    with outer:
        lab.small_step(net, inner)
        before = objects()
        answer, answers = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=in_child, args=(outer, inner, act, answers)
        )
        child.start()
        told = answer.recv()
        child.join()
        wanted = "nothing" if act == "exit" else "SyncError: this process"
        assert told.startswith(wanted), told
        assert objects() == before
        for _ in range(2):
            lab.small_step(net, inner)
    assert outer.committed == 1


class SaysThatItReloaded:
    """An exchange of somebody else's, which has a replica alone, and says what it must not."""

    rank, world_size = 0, 1

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, job, *, last=False):
        self.job, self.pending = job, self.inner.begin(job, last=last)
        return self

    def finish(self):
        return replace(self.pending.finish(), reloaded=self.job.kind == "outer")


def test_an_exchange_that_keeps_no_state_cannot_have_reloaded_the_model():
    model, inner, outer, _ = loop(SaysThatItReloaded(in_process(1)[0]), sync_every=1)
    model(torch.ones(1, 2)).sum().backward()
    text = "SaysThatItReloaded says that the model was reloaded"
    with pytest.raises(SyncError, match=text), outer:
        inner.step()
