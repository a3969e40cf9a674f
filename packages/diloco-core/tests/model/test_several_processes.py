"""Several processes that hold one model together are refused, wherever a replica enters a run."""

import datetime

import pytest
import torch
from loop_lab import exchanges, loop
from training_lab import PATIENCE
from warm_processes import WarmProcess

from diloco_core import ConfigurationError, ProcessGroupExchange, connect, in_process


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    enter_a_group(f"file://{tmp_path}/meet", 0, 1)
    yield
    torch.distributed.destroy_process_group()


def enter_a_group(meet, rank, size=2):
    patience = datetime.timedelta(seconds=PATIENCE)
    torch.distributed.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=size, timeout=patience
    )


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def several(model):
    wrapped = ddp(model)
    wrapped.process_group = Two()
    return wrapped


class Two:
    """A group of two processes."""

    def size(self):
        return 2


def sharded(model):
    from torch.distributed.fsdp import fully_shard  # it takes long

    return fully_shard(model)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (several, r"the model is wrapped for several processes \(DistributedDataParallel\)"),
        (
            lambda model: torch.nn.Sequential(several(model), torch.nn.Linear(2, 1)),
            "module '0' is wrapped for several processes",
        ),
        (sharded, "parameter '0.weight' is a DTensor"),
    ],
)
@pytest.mark.parametrize("kind", ["store", "elastic", "threads"])
def test_a_model_of_several_processes_is_refused(group, lab, wrap, text, kind):
    (exchange,) = exchanges(kind, 1)
    assert loop(exchange, lab.small_model()), "a group of one process is no obstacle"
    with pytest.raises(ConfigurationError, match=f"{text}.*one process is one replica"):
        loop(exchange, wrap(lab.small_model()))
    exchange.leave()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["store", "elastic", "threads"])
def test_a_model_that_is_wrapped_for_a_single_process_trains_as_the_model(group, lab, kind):
    ended = []
    for wrap in (lambda model: model, ddp):
        (exchange,) = exchanges(kind, 1)
        torch.manual_seed(0)
        model = wrap(lab.small_model())
        inner, outer = loop(exchange, model)[1:3]
        with outer:
            for _ in range(4):
                model(torch.ones(2, 3)).sum().backward()
                inner.step()
                inner.zero_grad()
        ended.append([parameter.detach().clone() for parameter in model.parameters()])
        assert outer.committed
    assert all(map(torch.equal, *ended))


def test_over_a_process_group_or_a_manager_it_stays_allowed(group, lab):
    for exchange in (ProcessGroupExchange(), *exchanges("manager", 1)):
        assert loop(exchange, ddp(lab.small_model()))


def beside(meet, rank, folder):
    """Enter a group, and try to make a loop with each of several exchanges."""
    enter_a_group(meet, rank)
    exchange = connect(folder, rank=rank, world_size=2)
    for each in (exchange, ProcessGroupExchange(), in_process(1)[0]):
        try:
            loop(each)
            print("made")  # noqa: T201 - the parent process reads it
        except ConfigurationError as error:
            print(error)  # noqa: T201
    exchange.leave()
    torch.distributed.barrier()


def later(meet, rank, folder):
    """Enter a group when a loop was made already, and the block of another one was entered."""
    before, inside = (
        connect(f"{folder}/{rank}-{name}", rank=0, world_size=1) for name in ("before", "inside")
    )
    made = loop(before)[2]
    model, inner, outer, _ = loop(inside, sync_every=1)

    def train():
        with outer:
            enter_a_group(meet, rank)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            inner.step()

    for enter in (train, made.__enter__):
        with pytest.raises(ConfigurationError) as refused:
            enter()
        print(refused.value)  # noqa: T201 - the parent process reads it
    before.leave()
    torch.distributed.barrier()


@pytest.mark.parametrize(("act", "made"), [(beside, 2), (later, 0)])
def test_a_group_of_several_processes_beside_a_store_is_refused(tmp_path, act, made):
    meet, folder = f"file://{tmp_path}/meet", str(tmp_path / "run")
    started = [WarmProcess(tmp_path / f"{rank}", act, meet, rank, folder) for rank in range(2)]
    for process in started:
        status, out, err = process.communicate()
        assert status == 0, err
        lines = out.splitlines()
        refused, others = lines[: len(lines) - made], lines[len(lines) - made :]
        assert others == ["made"] * made
        assert len(refused) == (1 if made else 2)
        for text in refused:
            assert text.startswith("this process is in a torch.distributed group of 2 processes")
            assert "ProcessGroupExchange()" in text
