"""The outer loop's argument ``codec``: what it changes, and where it is refused."""

import pytest
import torch
from training_lab import fill

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Exchange,
    ManagerExchange,
    MockManager,
    in_process,
    plan_exchange,
)


def make(rank=0):
    return fill(torch.nn.Linear(40, 30))


def refused(pattern, codec, exchange=None):
    model = make()
    exchange = exchange or in_process(1)[0]
    with pytest.raises(ConfigurationError, match=pattern):
        DiLoCo(model, torch.optim.SGD(model.parameters()), exchange, sync_every=1, codec=codec)


class Own:
    name, plain, block = "own", False, 1

    def size(self, dtype, numel):
        return numel

    def encode(self, values):
        return values.to(torch.int8).view(torch.uint8)

    def decode(self, data, out):
        out.copy_(data.view(torch.int8))


def test_what_is_no_codec_is_refused():
    names = "plain, fp32, bf16, fp16, int8, e2m1, topk64, topk128"
    for name in ("int9", "e3m0", "int8-6sigma"):  # the last two were there once
        refused(f"codec must be one of {names}, or a codec of your own, not '{name}'", name)
    refused("codec of your own, not None", None)
    refused(r"not .*\(a class; give an object of it\)", Own)
    without = type("Without", (), {"name": "x", "plain": False, "size": 1, "encode": 1})()
    refused("which lacks block, decode", without)


@pytest.mark.parametrize(
    ("member", "value", "pattern"),
    [
        ("name", "", "the name of a codec must be text"),
        ("name", 3, "the name of a codec must be text, not 3"),
        ("name", "int8", "named 'int8', like one of diloco-core"),
        ("plain", 0, "the plain of codec 'own' must be True or False"),
        ("block", 0, "the block of codec 'own' must be a whole number of at least 1, not 0"),
        ("block", True, "not True"),
        ("block", 1.5, "not 1.5"),
    ],
)
def test_a_codec_of_ones_own_is_looked_at(member, value, pattern):
    own = Own()
    setattr(own, member, value)
    refused(pattern, own)


class Unaware(Exchange):
    """An exchange of somebody's own that knows no codecs."""

    rank, world_size = 0, 1

    def join(self, schema):
        raise AssertionError

    begin = shards = leave = abort = join


def test_exchanges_without_codecs_refuse_them():
    managed = ManagerExchange(MockManager(in_process(1)[0]))
    refused("'int8' cannot be used with ManagerExchange, which sends values as", "int8", managed)
    refused("cannot be used with Unaware", "bf16", Unaware())
    with pytest.raises(ConfigurationError, match="codec must be one of"):
        plan_exchange(1e6, 4, 1e9, codec="int9")
