"""Models that the processes of a replica cannot hold together."""

import pytest
import torch
from torch import distributed

from diloco_core import ConfigurationError
from diloco_core._processes._checks import refuse_together


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


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda _: torch.nn.Sequential(FullyShardedDataParallel()),
            "module '0' is wrapped by FullyShardedDataParallel (FSDP1). Use fully_shard",
        ),
        (
            of_one_process,
            "the model is in a DistributedDataParallel of 1 processes, and this replica has 2",
        ),
        (sparse, "'weight' is a Tensor (torch.sparse_coo), which cannot be synced"),
    ],
    ids=["fsdp1", "ddp of others", "sparse"],
)
def test_a_model_is_refused_by_name_on_all_of_them(tmp_path, made, words):
    try:
        with pytest.raises(ConfigurationError) as refused:
            refuse_together(Alone(), made(tmp_path), {}, bool)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    assert str(refused.value).startswith(f"process 0 of this replica: {words}")
