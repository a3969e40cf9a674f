"""Models that are exported, and replicas that have trained them."""

import warnings
from functools import partial

import torch
from safetensors.torch import load_file
from torch import nn

from diloco_core import DiLoCo, Elastic, RendezvousError, StoreExchange, export
from diloco_core._store._open import open_store


class Everything(nn.Module):
    """Tied across modules, frozen, BatchNorm, odd shapes and layouts, dtypes, a submodule that is
    called ``module``.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.module = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.again = self.module
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.arange(12.0).reshape(3, 4).t().half(), requires_grad=False)
        self.frozen_again = self.frozen
        self.frozen_turned = nn.Parameter(
            torch.arange(20.0, 40.0).reshape(4, 5).t().half(), requires_grad=False
        )
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen_scalar = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.frozen_empty = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.strided = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("mask", torch.full((4, 4), -float("inf")).triu(1))
        self.register_buffer("same_mask", self.mask)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(3), persistent=False)


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(40, 30, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(40, 2, bias=False)
        self.up = nn.Linear(2, 30, bias=False)


def compiled_by_torch(model):
    with warnings.catch_warnings():  # of the compiler's own imports
        warnings.simplefilter("ignore")
        return torch.compile(model, backend="eager")


class Wrapped(nn.Module):
    """A model whose inner part is compiled by itself."""

    def __init__(self, compiled=False):
        super().__init__()
        self.inner = compiled_by_torch(nn.Linear(3, 3)) if compiled else nn.Linear(3, 3)
        self.outer = nn.Linear(3, 1)


class Distributed(nn.parallel.DistributedDataParallel):
    """The real class without the process group that it asks for."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": compiled_by_torch,
    "DDP": Distributed,
    "compiled DDP": lambda model: compiled_by_torch(Distributed(model)),
    "DDP of compiled": lambda model: Distributed(compiled_by_torch(model)),
    # On a GPU it moves the model there, which parts buffers that share their values.
    **({} if torch.accelerator.is_available() else {"DataParallel": nn.DataParallel}),
}


def exchanges(folder, kind, count=2, **options):
    stores = [open_store(str(folder)) for _ in range(count)]
    if kind == "fixed":
        return [StoreExchange(store, rank, count) for rank, store in enumerate(stores)]
    every = 1 if kind == "gather" else None
    elastic = Elastic(count, topology=kind, publish_every=every, **options)
    return [StoreExchange(store, rank, count, elastic) for rank, store in enumerate(stores)]


def trained(lab, folder, kind, make, wrap=lambda model: model, syncs=3, **options):
    """Return rank 0's plain model after some syncs; the other ranks' parameters begin elsewhere."""

    def replica(exchange):
        plain = lab.fill(make())
        model = wrap(plain)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with DiLoCo(model, inner, exchange, **{"sync_every": 1, **options}) as outer:
            step = 0
            while outer.committed < syncs:
                lab.push(plain, inner, exchange.rank, step)
                step += 1
        return {
            name: value.clone()
            for name, value in plain.state_dict().items()
            if isinstance(value, torch.Tensor)
        }

    values, *_ = lab.run(replica, exchanges(folder, kind))
    return values


def history(lab, folder, kind, fragments=1, syncs=6, **elastic):
    """Return what the model held after every sync that rank 0 saw."""
    held = {}

    def replica(exchange):
        net = lab.fill(Adapted())
        inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)

        def seen(report):
            if exchange.rank == 0:
                held[report.sync] = lab.values(net)

        options = {"sync_every": fragments, "fragments": fragments, "on_sync": seen}
        with DiLoCo(net, inner, exchange, **options) as outer:
            while outer.committed < syncs:
                lab.push(net, inner, exchange.rank, outer.committed)

    lab.run(replica, exchanges(folder, kind, **elastic))
    return held


def loads_exactly(path, make, values):
    model = make()
    model.load_state_dict(load_file(path), strict=True)
    found = model.state_dict()
    for name, value in values.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name


def all_exported(run, target, most):
    """The models that export gives of all outer steps below a number; others are refused."""
    results = {}
    for step in range(most):
        try:
            assert export(run, target, at=step) == step
        except RendezvousError as error:
            assert f"does not hold the state after outer step {step}. It" in str(error)  # noqa: PT017
        else:
            results[step] = load_file(target)
    return results


def meddled(monkeypatch, **members):
    """Let export open stores with other members; a method is ``method(real, *arguments)``."""

    def opened(uri, **options):
        store = open_store(uri, **options)
        for name, member in members.items():
            value = partial(member, getattr(store, name)) if callable(member) else member
            setattr(store, name, value)
        return store

    monkeypatch.setattr("diloco_core._export._export.open_store", opened)
