"""All replicas add up what was sent, the sender too, and objects have the codec's sizes."""

from functools import cache

import pytest
import torch
from codecs_lab import CODECS, SPARSE, decoded, random
from sync_lab import Halved
from training_lab import run

from diloco_core import DiLoCo, connect, in_process

ALL = [*CODECS.values(), Halved()]
KINDS = ("in process", "fixed", "sharded", "gather")
REPLICAS = 3
SHARD = 4096  # a whole number of blocks of every codec
SIZE = REPLICAS * SHARD
START = torch.linspace(-1.0, 1.0, SIZE)


def exchanges(kind, folder, **limits):
    if kind == "in process":
        return in_process(REPLICAS)
    elastic = {"min_replicas": REPLICAS, "topology": kind, **limits} if kind != "fixed" else {}
    # Incarnations of an elastic run may cut what they handle as they like.
    chunks = [64, 64, 64] if kind == "fixed" else [64, 256, 2**20]
    return [
        connect(folder, rank=rank, world_size=REPLICAS, chunk_bytes=chunks[rank], **elastic)
        for rank in range(REPLICAS)
    ]


def synced(kind, folder, codec_of, **limits):
    """Return what the replicas hold after one sync, and how many bytes they have received."""

    def replica(exchange):
        model, reports = torch.nn.Module(), []
        model.weight = torch.nn.Parameter(START.clone())
        model.register_buffer("running", torch.zeros(24))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"outer_lr": 0.5, "outer_momentum": 0.0, "nesterov": False, "flush": "none"}
        options |= {"codec": codec_of(exchange.rank), "save_inner_every": 0}
        with DiLoCo(model, inner, exchange, sync_every=1, on_sync=reports.append, **options):
            model.weight.grad = random(SIZE, exchange.rank)
            model.running += exchange.rank / 7
            inner.step()
        return model.weight.detach(), model.running, reports[0].bytes_received

    weights, buffers, received = zip(*run(replica, exchanges(kind, folder, **limits)), strict=True)
    return weights, buffers, sum(received)


@cache
def plainly_received(kind, folder):
    return synced(kind, folder / f"plain {kind}", lambda rank: "plain")[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("codecs")


@pytest.mark.sampled
@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
def test_all_add_up_what_was_sent(codec, folder, tmp_path):
    # As an exchange does it: the difference of the global copy and the model.
    deltas = [START - (START - random(SIZE, rank)) for rank in range(REPLICAS)]
    sent = [decoded(codec, delta) for delta in deltas]
    # Zeros of a sparse codec were not sent, and do not count.
    senders = sum(delta != 0 for delta in sent).clamp(min=1) if codec.name in SPARSE else REPLICAS
    wanted = START - 0.5 * sum(sent) / senders
    if any(not torch.equal(*pair) for pair in zip(sent, deltas, strict=True)):
        # The tolerance below is smaller than what the codec loses.
        assert not torch.allclose(wanted, START - 0.5 * sum(deltas) / REPLICAS, rtol=0, atol=1e-5)
    first = None
    saved = REPLICAS * (4 * SHARD - codec.size(torch.float32, SHARD))
    for kind in KINDS:
        weights, buffers, received = synced(kind, tmp_path / kind, lambda rank: codec)
        first = weights[0] if first is None else first
        for weight, buffer in zip(weights, buffers, strict=True):
            assert torch.equal(weight, first), kind
            assert torch.allclose(buffer, torch.full((24,), 1 / 7))  # they are sent as they are
        assert torch.allclose(first, wanted, rtol=0, atol=1e-6)
        if kind != "in process":
            read = (REPLICAS - 1) * (REPLICAS if kind == "gather" else 1)
            assert plainly_received(kind, folder) - received == read * saved
