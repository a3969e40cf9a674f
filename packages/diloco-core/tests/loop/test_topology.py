"""Several processes that hold one model together are refused, wherever a replica enters a run."""

import datetime

import pytest
import torch
from training_lab import PATIENCE
from warm_processes import WarmProcess

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    ManagerExchange,
    MockManager,
    ProcessGroupExchange,
    connect,
    in_process,
)

TORCHRUN = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def loop(model, exchange):
    return DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange, sync_every=2)


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def sharded(model):
    from torch.distributed.fsdp import fully_shard  # it takes long

    return fully_shard(model)


def part_of_it(model):
    return torch.nn.Sequential(ddp(model), torch.nn.Linear(2, 1))


def over_a_store(tmp_path):
    return connect(str(tmp_path / "run"), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (ddp, r"the model is wrapped for several processes \(DistributedDataParallel\)"),
        (part_of_it, "module '0' is wrapped for several processes"),
        (sharded, "parameter '0.weight' is a DTensor"),
    ],
)
@pytest.mark.parametrize("kind", ["store", "elastic", "threads"])
def test_a_model_of_several_processes_is_refused(group, lab, tmp_path, wrap, said, kind):
    options = {"min_replicas": 1} if kind == "elastic" else {}
    exchange = (
        in_process(1)[0]
        if kind == "threads"
        else connect(str(tmp_path / "run"), rank=0, world_size=1, **options)
    )
    model = wrap(lab.small_model())
    with pytest.raises(ConfigurationError, match=f"{said}.*one process is one replica"):
        loop(model, exchange)
    exchange.leave()


def test_over_a_process_group_or_a_manager_it_stays_allowed(group, lab):
    for exchange in (ProcessGroupExchange(), ManagerExchange(MockManager(in_process(1)[0]))):
        assert loop(ddp(lab.small_model()), exchange)


def test_a_group_of_one_process_is_no_obstacle(group, lab, tmp_path):
    exchange = over_a_store(tmp_path)
    assert loop(lab.small_model(), exchange)
    exchange.leave()


def enter_a_group(meet, rank):
    torch.distributed.init_process_group(
        "gloo",
        init_method=meet,
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )


def beside(meet, rank, folder):
    """What each of two processes says when it tries the exchanges."""
    enter_a_group(meet, rank)
    model = torch.nn.Linear(2, 1)
    exchange = connect(folder, rank=rank, world_size=2)
    for each in (exchange, ProcessGroupExchange(), in_process(1)[0]):
        try:
            loop(model, each)
            print("made")  # noqa: T201 - the parent process reads it
        except ConfigurationError as error:
            print(error)  # noqa: T201 - the parent process reads it
    exchange.leave()
    torch.distributed.barrier()


def test_a_group_of_several_processes_beside_a_store_is_refused(tmp_path):
    meet, folder = f"file://{tmp_path}/meet", str(tmp_path / "run")
    started = [WarmProcess(tmp_path / f"{r}", beside, meet, r, folder) for r in range(2)]
    for process in started:
        status, out, err = process.communicate()
        assert status == 0, err
        refused, *others = out.splitlines()
        assert refused.startswith("this process is in a torch.distributed group of 2 processes")
        assert "ProcessGroupExchange()" in refused
        assert others == ["made", "made"]


def later(meet, rank, folder):
    """What a replica says when its process enters a group after its loop was made, and after its
    block was entered.
    """
    before, inside = (
        connect(f"{folder}/{rank}-{name}", rank=0, world_size=1) for name in ("before", "inside")
    )
    models = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    made = loop(models[0], before)
    inner = torch.optim.SGD(models[1].parameters(), lr=0.1)
    outer = DiLoCo(models[1], inner, inside, sync_every=1)

    def train():
        with outer:
            enter_a_group(meet, rank)
            for parameter in models[1].parameters():
                parameter.grad = torch.ones_like(parameter)
            inner.step()

    for enter in (train, made.__enter__):
        with pytest.raises(ConfigurationError) as refused:
            enter()
        print(refused.value)  # noqa: T201 - the parent process reads it
    before.leave()
    torch.distributed.barrier()


def test_so_is_a_group_that_is_made_after_the_loop(tmp_path):
    meet, folder = f"file://{tmp_path}/meet", str(tmp_path / "run")
    started = [WarmProcess(tmp_path / f"{r}", later, meet, r, folder) for r in range(2)]
    for process in started:
        status, out, err = process.communicate()
        assert status == 0, err
        for refused in out.splitlines():
            assert refused.startswith("this process is in a torch.distributed group of 2 processes")
        assert len(out.splitlines()) == 2


class TestTorchrun:
    def test_one_of_several_processes_is_no_replica_by_itself(self, environ):
        for given in ({}, {"rank": 0}, {"world_size": 4}):
            with pytest.raises(ConfigurationError, match="LOCAL_WORLD_SIZE=2") as caught:
                connect(environ={**environ, **TORCHRUN}, **given)
            assert "rank= and world_size=" in str(caught.value)
            assert "resume" not in str(caught.value)

    def test_unless_it_is_told_which_one(self, environ):
        exchange = connect(environ={**environ, **TORCHRUN}, rank=1, world_size=2)
        assert (exchange.rank, exchange.world_size) == (1, 2)
        exchange.leave()

    def test_one_process_is_one_replica(self, environ):
        exchange = connect(environ={**environ, **TORCHRUN, "LOCAL_WORLD_SIZE": "1"})
        assert (exchange.rank, exchange.world_size) == (1, 4)
        exchange.leave()
