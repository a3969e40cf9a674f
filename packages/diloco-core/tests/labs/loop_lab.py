"""Small outer loops, in every kind of exchange."""

import itertools
import re

import torch
from torch import nn
from training_lab import fill, push

from diloco_core import DiLoCo, Elastic, ManagerExchange, MockManager, StoreExchange, in_process
from diloco_core._store._open import open_store

STORES = ("store", "sharded", "gather")
KINDS = ("threads", *STORES)
AVERAGING = {"outer_lr": 1.0, "outer_momentum": 0.0}
_places = itertools.count()


class Refusing(MockManager):
    """Votes against some attempts to commit, by their numbers."""

    def __init__(self, exchange, refused):
        super().__init__(exchange)
        self.votes = iter(number not in refused for number in range(10**6))

    def should_commit(self):
        return next(self.votes) and super().should_commit()


def exchanges(
    kind, count, place=None, *, ranks=None, least=None, resume=False, refused=(), grace=60.0, **more
):
    """Exchanges of one kind for all replicas, or some; without a place, over a store of their own.

    Args:
        kind: One of ``KINDS``, "manager" or "elastic"; "store" is a fixed run.
        place: Where the store is, as a folder or a URI.
        least: In elastic runs, how many replicas a sync needs; all of them if left out.
        refused: With managers, the numbers of the attempts to commit that they vote against.
    """
    if kind == "threads":
        return in_process(count, **more)
    if kind == "manager":
        return [
            ManagerExchange(Refusing(each, refused), rank=each.rank, world_size=count)
            for each in in_process(count)
        ]
    place = f"memory://loop/{next(_places)}" if place is None else str(place)
    membership, options = None, {**more, "resume": resume}
    if kind != "store":
        topology = "sharded" if kind == "elastic" else kind
        published = more.pop("publish_every", None)
        options = more
        membership = Elastic(
            least or count, grace=grace, topology=topology, publish_every=published, resume=resume
        )
    return [
        StoreExchange(open_store(place), rank, count, membership, **options)
        for rank in (range(count) if ranks is None else ranks)
    ]


def loop(exchange=None, model=None, inner=None, **options):
    """A model of two layers, its inner optimizer, an outer loop around them, and its reports."""
    model = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = inner or torch.optim.SGD(trained, lr=1.0)
    reports = []
    options = {"sync_every": 2, "on_sync": reports.append, **options}
    return model, inner, DiLoCo(model, inner, exchange or in_process(1)[0], **options), reports


class Net(nn.Module):
    """A frozen layer, two trainable ones, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)


def net_loop(exchange=None, model=None, inner=None, **options):
    """A :class:`Net`, its inner optimizer, and an outer loop around them."""
    model = fill(Net()) if model is None else model
    return loop(exchange, model, inner, **{"sync_every": 1, **options})[:3]


def live(model, inner, outer, *steps):
    """Enter the block, and take a step with the gradients of each number.

    What is a function is called with the model instead.
    """
    with outer:
        for step in steps:
            step(model) if callable(step) else push(model, inner, outer.exchange.rank, step)
    return outer


def at_once(act):
    """For ``Timing(in_background=...)``: do it before the training goes on."""
    act()
    return lambda _: True


def fragments_of(model, fragments, **options):
    """The names of the tensors in each fragment, in order, as a saved state tells them."""
    options = {"sync_every": 27720, "fragments": fragments, **options}
    with loop(None, model, **options)[2] as outer:
        tensors = outer.state_dict()["tensors"]
    results = {}
    for name, text in tensors.items():
        number = re.search(r"in fragment (\d+)", text)
        results.setdefault(int(number[1]) if number else 0, []).append(name)
    return [results[number] for number in sorted(results)]
