"""torchft itself, live: its DiLoCo over our stores, and our loop over its manager.

``hatch run torchft:test``.
"""

from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch

from diloco_core import (
    DiLoCo,
    ManagerExchange,
    MismatchError,
    MockManager,
    StoreExchange,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.torchft

LOGGER = "ignore:The 'warn' method is deprecated:DeprecationWarning"  # of torchft
STEPS = 12
H = 4
# One line of a network of three: enough elements that every replica owns a shard.
WIDTH = 40


class Net(torch.nn.Module):
    """Two parts, in float64, the same everywhere."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.second = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch)))


def trajectory(lab, rank, wrap, *, seed=0, flushed=False):
    """Return what a replica holds after every inner step, and at the end if it is ``flushed``."""
    model = lab.fill(Net(), seed)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with wrap(model, inner):
        for _ in range(STEPS):
            batch = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
            model(batch).sub(rank).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
            seen.append(lab.values(model))
    if flushed:  # torchft leaves the last steps of a fragment open
        seen.append(lab.values(model))
    return seen


def torchft_loop(model, inner, manager, fragments, **options):
    """torchft's DiLoCo."""
    from torchft.local_sgd import DiLoCo as TorchftDiLoCo

    parts = [model] if fragments == 1 else [model.first, model.second]
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts
    ]
    return TorchftDiLoCo(manager, parts, inner, outer, sync_every=H, **options)


def our_loop(model, inner, exchange, fragments):
    """Ours."""
    parts = 1 if fragments == 1 else [model.first, model.second]
    return DiLoCo(model, inner, exchange, sync_every=H, fragments=parts)


def stores(kind, tmp_path, replicas):
    uri = str(tmp_path / "run") if kind == "folder" else f"memory://torchft{tmp_path}"
    return [StoreExchange(open_store(uri), rank, replicas) for rank in range(replicas)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) == STEPS
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in one:
            assert torch.allclose(one[name], other[name], rtol=1e-12, atol=1e-12), (step, name)


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("replicas", [1, 3])
def test_its_diloco_over_our_store_makes_our_numbers(lab, tmp_path, kind, fragments, replicas):
    def over_ours(exchange):
        return trajectory(
            lab, exchange.rank, lambda model, inner: our_loop(model, inner, exchange, fragments)
        )

    def over_theirs(exchange):
        manager = MockManager(exchange)
        seen = trajectory(
            lab, exchange.rank, lambda model, inner: torchft_loop(model, inner, manager, fragments)
        )
        assert manager.current_step() == STEPS // H * fragments
        assert list(manager.state_dict_fns) == [
            f"StreamingDiLoCoFragment_{number}" for number in range(fragments)
        ]
        return seen

    ours = lab.run(over_ours, stores(kind, tmp_path / "ours", replicas))
    theirs = lab.run(over_theirs, stores(kind, tmp_path / "theirs", replicas))
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("bucketed", [False, True])
def test_its_options_work_over_our_store(lab, tmp_path, bucketed):
    """Its delay, its mixing and its buckets ask no more of a manager than the eight members."""

    def over(exchange):
        options = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
        options["use_bucketization"] = bucketed
        return trajectory(
            lab, exchange.rank, lambda m, i: torchft_loop(m, i, MockManager(exchange), 2, **options)
        )

    runs = lab.run(over, stores("folder", tmp_path, 2))
    # With alpha a half, replicas keep something of their own.
    assert not lab.identical([run[-1] for run in runs])
    assert all(value.isfinite().all() for run in runs for value in run[-1].values())


@contextmanager
def real_manager(lighthouse, rank, *, init_sync=False):
    """Return torchft's manager of a replica: a server, a store and a gloo group on loopback."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=20)
    limits = dict.fromkeys(("timeout", "quorum_timeout", "connect_timeout"), patience)
    states = {"load_state_dict": lambda state: None, "state_dict": dict}
    place = {"store_addr": "127.0.0.1", "store_port": store.port, "rank": 0, "world_size": 1}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience), min_replica_size=2, use_async_quorum=False,
        replica_id=f"replica-{rank}", lighthouse_addr=lighthouse, hostname="127.0.0.1",
        init_sync=init_sync, **limits, **states, **place,
    )  # fmt: skip
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)


@pytest.mark.filterwarnings(LOGGER)
def test_our_loop_over_its_manager_makes_our_numbers(lab, tmp_path):
    from torchft.coordination import LighthouseServer

    def over_store(exchange):
        return trajectory(
            lab, exchange.rank, lambda model, inner: our_loop(model, inner, exchange, 2)
        )

    with ExitStack() as stack:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200)
        stack.callback(lighthouse.shutdown)

        def over_manager(exchange):
            with real_manager(lighthouse.address(), exchange.rank) as manager:
                ours = ManagerExchange(manager, rank=exchange.rank, world_size=2)
                return trajectory(
                    lab, exchange.rank, lambda model, inner: our_loop(model, inner, ours, 2)
                )

        managed = lab.run(over_manager, stores("memory", tmp_path / "unused", 2))
    expected = lab.run(over_store, stores("folder", tmp_path, 2))
    for one, other in zip(managed, expected, strict=True):
        assert_same(one, other)


@pytest.mark.filterwarnings(LOGGER, "ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("init_sync", [True, False])
def test_initial_values_that_differ_are_healed_or_refused(lab, fragments, init_sync):
    from torchft.coordination import LighthouseServer

    with ExitStack() as stack:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200)
        stack.callback(lighthouse.shutdown)

        def replica(exchange):
            rank = exchange.rank
            with real_manager(lighthouse.address(), rank, init_sync=init_sync) as manager:
                ours = ManagerExchange(manager, rank=rank, world_size=2)
                return trajectory(
                    lab, rank, lambda m, i: our_loop(m, i, ours, fragments), seed=rank, flushed=True
                )

        results = run_replicas(replica, in_process(2))
    if init_sync:
        assert not any(isinstance(result, BaseException) for result in results), results
        assert lab.identical([result[-1] for result in results])
    else:
        assert all(isinstance(result, MismatchError) for result in results), results
