"""Models that the processes of a replica cannot hold together."""

import pytest
import torch
from torch import distributed

from diloco_core import ConfigurationError, DiLoCo, connect
from diloco_core._processes._checks import refuse_together

ONLY_PLAIN = "and only plain dense tensors are synced: convert it first"


class Alone:
    """One of two processes of a replica, in place of :class:`.Inside`."""

    processes, ranks = 2, (0, 1)

    def collect(self, message):
        return [message, message]


class FullyShardedDataParallel(torch.nn.Sequential):
    """A model that FSDP1 has wrapped goes by the name of its class."""


def of_one_process(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def sparse(_):
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.eye(2).to_sparse())
    return model


def of_codes(_):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    return model


class Codes(torch.Tensor):
    """A tensor of another class, as libraries make them for quantised weights."""


def of_a_class(_):
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(2, 2).as_subclass(Codes))
    return model


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch gives it up
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda _: torch.nn.Sequential(FullyShardedDataParallel()),
            "module '0' is wrapped by FullyShardedDataParallel (FSDP1). Use fully_shard",
        ),
        (
            of_one_process,
            "the model is in a DistributedDataParallel of processes [0], and this replica is (0, 1)"
            ": give it a process_group of exactly these",
        ),
        (sparse, f"'weight' is a Tensor of torch.float32 (torch.sparse_coo), {ONLY_PLAIN}"),
        (of_codes, f"'codes' is a Tensor of torch.qint8 (torch.strided), {ONLY_PLAIN}"),
        (of_a_class, f"'weight' is a Codes of torch.float32 (torch.strided), {ONLY_PLAIN}"),
    ],
    ids=["fsdp1", "ddp of others", "sparse", "quantised", "quantised by a class"],
)
def test_a_model_is_refused_by_name_on_all_of_them(tmp_path, made, words):
    try:
        with pytest.raises(ConfigurationError) as refused:
            refuse_together(Alone(), made(tmp_path), {}, bool)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    assert str(refused.value).startswith(f"process 0 of this replica: {words}")


TORCHRUN = {
    "REPLICA_RANK": "0",
    "REPLICA_WORLD_SIZE": "1",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.fixture
def exchange(tmp_path, monkeypatch):
    """The connection of the first of two processes; in torch's group, it is alone."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    connected = connect(tmp_path / "run", join_timeout=70.0, sync_timeout=500.0)
    of_one_process(tmp_path)
    yield connected
    connected.abort(RuntimeError("the test is over"))
    distributed.destroy_process_group()


def test_a_stage_of_a_pipeline_is_refused(exchange):
    """Its layers, given in its place, differ between the processes, which is refused as well."""
    from torch.distributed.pipelining import PipelineStage

    layers = torch.nn.Linear(2, 2)
    stage = PipelineStage(layers, 0, 2, torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="not a PipelineStage"):
        DiLoCo(stage, torch.optim.SGD(layers.parameters()), exchange, sync_every=2)


def test_the_processes_wait_longer_for_their_leader_than_it_waits_for_the_store(exchange):
    layers = torch.nn.Linear(2, 2)
    loop = DiLoCo(layers, torch.optim.SGD(layers.parameters()), exchange, sync_every=2)
    gloo = loop._inside._group._get_backend(torch.device("cpu"))
    limit = gloo.options._timeout.total_seconds()
    assert limit == 70.0 + 70.0 + 500.0, "for a run, for all replicas, and for a sync"
