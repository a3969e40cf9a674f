"""Replicas with buffers of any kind, in every exchange."""

import itertools

import torch
from torch import nn

from diloco_core import DiLoCo, Elastic, StoreExchange, Timing, in_process
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

_prefixes = itertools.count()
KINDS = ["threads", "fixed", "sharded", "gather"]
# Complex buffers are refused; all else that safetensors knows travels as it is.
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip


def exchanges(lab, kind, replicas, *, least=None, hurried=False):
    if kind == "threads":
        return in_process(replicas)
    prefix = next(_prefixes)
    stores = [open_store(f"memory://buffers/{prefix}") for _ in range(replicas)]
    if kind == "fixed":
        return [StoreExchange(store, rank, replicas) for rank, store in enumerate(stores)]
    elastic, timings = Elastic(least or replicas, topology=kind), [Timing()] * replicas
    if hurried:  # a grace costs no real time, and nobody is ever given up
        clocks = [lab.Clock() for _ in stores]
        timings = [Timing(sync_timeout=1e12, clock=clock, sleep=clock.sleep) for clock in clocks]
    return [
        StoreExchange(store, rank, replicas, elastic, timing=timing)
        for rank, (store, timing) in enumerate(zip(stores, timings, strict=True))
    ]


def with_buffers(lab, buffers):
    net = lab.fill(nn.Linear(2, 2))
    for number, buffer in enumerate(buffers):
        net.register_buffer(f"buffer{number}", buffer.clone())
    return net


def synced(lab, kind, buffers, policy="mean", later=None, **options):
    """Return what replicas hold after two syncs; rank r has ``later[r]`` before the second."""

    def replica(exchange):
        net = with_buffers(lab, buffers[exchange.rank])
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        with DiLoCo(net, inner, exchange, sync_every=1, buffers=policy):
            lab.push(net, inner, exchange.rank, 0)
            for number, buffer in enumerate(later[exchange.rank] if later else ()):
                getattr(net, f"buffer{number}").copy_(buffer)
            lab.push(net, inner, exchange.rank, 1)
        return list(net.buffers())

    return run_replicas(replica, exchanges(lab, kind, len(buffers), **options))


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same_bytes(a, b):
    return (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))
