"""Share how replicas are run, filled, pushed, compared and brought into trouble."""

import threading

import torch

from diloco_core import DiLoCo, StoreExchange, Timing
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

#: Seconds after which a test that waits for something real fails instead of hanging. Nothing passes
#: sooner or later because of it, so it is long enough for any load of the machine.
PATIENCE = 600.0


def run(train, exchanges):
    """``train(exchange)`` in one thread per replica; what each returned.

    Errors of all replicas are raised together.
    """
    results = run_replicas(train, exchanges)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise BaseExceptionGroup("replicas failed", errors)
    return results


def fill(model, seed=0):
    """Give a model the same random values everywhere; threads share torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def push(model, inner, rank, step):
    """An inner step whose gradients depend on rank, step and element, and on nothing else."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.mul(0.1).to(parameter.dtype)
    inner.step()


def values(model):
    """A copy of everything that a model holds."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def identical(runs):
    """Return whether all replicas hold the same bytes."""
    return all(
        run.keys() == runs[0].keys() and all(torch.equal(run[name], runs[0][name]) for name in run)
        for run in runs
    )


def replica(make_model, exchange, steps=4, **options):
    """Train a replica by plain SGD with the gradients of ``push``; return what its model holds."""
    model = make_model(exchange.rank)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with DiLoCo(model, inner, exchange, **{"sync_every": 2, **options}):
        for step in range(steps):
            push(model, inner, exchange.rank, step)
    return values(model)


def until(make_model, exchange, last, **options):
    """Train as in ``replica``, up to a number of inner steps in all incarnations."""
    model = make_model(exchange.rank)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, inner, exchange, **{"sync_every": 2, **options}) as outer:
        while outer.inner_steps < last:
            push(model, inner, exchange.rank, outer.inner_steps)
    return values(model)


def train(make_model, exchanges, steps=4, **options):
    """Replicas as in ``replica``; what each model holds at the end."""
    return run(lambda exchange: replica(make_model, exchange, steps, **options), exchanges)


class Clock:
    """Time that passes only by sleeping; every thread that sleeps moves it on."""

    def __init__(self):
        self.now = 0.0
        self.lock = threading.Lock()

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        with self.lock:
            self.now += seconds


def store_exchanges(tmp_path, world_size, ranks=None, run_id="", **limits):
    """Exchanges over one folder; with ``limits``, each set of them has a clock of its own."""
    clock = Clock()
    timing = Timing(**limits, clock=clock, sleep=clock.sleep) if limits else Timing()
    return [
        StoreExchange(
            open_store(str(tmp_path / "run")), rank, world_size, run_id=run_id, timing=timing
        )
        for rank in (range(world_size) if ranks is None else ranks)
    ]


def small_model(seed=0, width=4):
    """Two layers, the same wherever they are made with this seed."""
    # Replicas are threads, and torch's generator, of which all of them draw, is left alone.
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.nn.Linear(*size, device="meta") for size in ((3, width), (width, 2))]
    model = torch.nn.Sequential(*layers).to_empty(device="cpu")
    with torch.no_grad():
        for layer in model:
            for parameter in layer.parameters():
                values = torch.rand(parameter.shape, generator=generator)
                parameter.copy_((2 * values - 1) / layer.in_features**0.5)
    return model


def outer_loop(net, exchange, **options):
    """An outer loop that syncs after every step, and its inner optimizer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return DiLoCo(net, optimizer, exchange, **{"sync_every": 1, **options}), optimizer


def small_step(net, optimizer):
    """One inner step."""
    net(torch.ones(5, 3)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def kinds(results):
    """Types of what replicas returned or raised."""
    return [type(result) for result in results]


class Loader:
    """A data loader whose position is saved with the inner state."""

    def __init__(self):
        self.position, self.seen = 0, []

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        self.seen.append(self.position)
        return torch.full((4, 3), float(self.position))

    def state_dict(self):
        return {
            "position": self.position,
            "seen": list(self.seen),
            "pair": (1, None),
            "weights": torch.ones(3),
        }

    def load_state_dict(self, state):
        assert state["pair"] == (1, None)
        assert torch.equal(state["weights"], torch.ones(3))
        self.position, self.seen = state["position"], state["seen"]
