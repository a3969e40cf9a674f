"""Identities that hold exactly, whatever the model: FedAvg, the plain optimizer, one replica, synchronous training."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_core import DiLoCo, ManagerExchange, MockManager, ObjectStoreExchange, in_process
from diloco_core._store import open_store
from diloco_core.testing import run_replicas

_prefixes = itertools.count()


class Net(torch.nn.Module):
    """Two layers in float64 whose random start does not depend on other threads."""

    def __init__(self, seed=0, width=5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(3, width, dtype=torch.float64)
        self.second = torch.nn.Linear(width, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return self.second(self.first(x).tanh())


def batches(rank, count, size=4):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(size, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def loss_of(net, batch):
    return net(batch).square().mean()


def flat(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def train(exchange, steps, make_inner, *, data=None, net=None, **options):
    """One replica; returns its parameters after every inner step, and at the end."""
    net = net or Net()
    inner = make_inner(net.parameters())
    seen = []
    with DiLoCo(net, inner, exchange, **options):
        for batch in data if data is not None else batches(exchange.rank, steps):
            loss_of(net, batch).backward()
            inner.step()
            inner.zero_grad()
            seen.append(flat(net))
    return [*seen, flat(net)]


def plain(steps, make_inner, data):
    net = Net()
    inner = make_inner(net.parameters())
    seen = []
    for batch in data[:steps]:
        loss_of(net, batch).backward()
        inner.step()
        inner.zero_grad()
        seen.append(flat(net))
    return seen


def results(runs):
    for run in runs:
        if isinstance(run, BaseException):
            raise run
    return runs


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def same(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


AVERAGING = {"outer_lr": 1.0, "outer_momentum": 0.0}


@pytest.mark.parametrize("make_inner", [sgd, adamw])
def test_outer_sgd_with_lr_1_is_federated_averaging(make_inner):
    def averaged():
        """Local training from a common start, then the mean of the parameters."""
        nets = [Net() for _ in range(3)]
        inners = [make_inner(net.parameters()) for net in nets]
        data = [batches(rank, 8) for rank in range(3)]
        for step in range(8):
            for net, inner, own in zip(nets, inners, data, strict=True):
                loss_of(net, own[step]).backward()
                inner.step()
                inner.zero_grad()
            if step % 4 == 3:
                mean = torch.stack([flat(net) for net in nets]).mean(0)
                for net in nets:
                    torch.nn.utils.vector_to_parameters(mean.clone(), net.parameters())
        return mean

    runs = results(run_replicas(lambda e: train(e, 8, make_inner, sync_every=4, **AVERAGING), in_process(3)))
    for run in runs:
        assert same(run[-1], averaged())


@pytest.mark.parametrize("make_inner", [sgd, adamw])
def test_one_replica_with_a_sync_per_step_is_the_plain_optimizer(make_inner):
    data = batches(0, 10)
    (run,) = results(
        run_replicas(lambda e: train(e, 10, make_inner, data=data, sync_every=1, **AVERAGING), in_process(1))
    )
    for ours, theirs in zip(run, plain(10, make_inner, data), strict=False):
        assert same(ours, theirs)


def test_identical_replicas_are_one():
    data = batches(0, 12)
    options = {"sync_every": 4, "fragments": 2}
    many = results(run_replicas(lambda e: train(e, 12, adamw, data=data, **options), in_process(4)))
    (one,) = results(run_replicas(lambda e: train(e, 12, adamw, data=data, **options), in_process(1)))
    for run in many:
        assert all(map(same, run, one))


def test_a_sync_per_step_of_sgd_is_synchronous_data_parallel_training():
    net = Net()
    inner = sgd(net.parameters())
    data = [batches(rank, 10) for rank in range(3)]
    for step in range(10):
        sum(loss_of(net, own[step]) / 3 for own in data).backward()
        inner.step()
        inner.zero_grad()
    for run in results(run_replicas(lambda e: train(e, 10, sgd, sync_every=1, **AVERAGING), in_process(3))):
        assert same(run[-1], flat(net))


OUTER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.7),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True, fused=True),
    "heavy ball": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9),
    "weight decay": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
}


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(OUTER)),
    replicas=st.integers(1, 4),
    width=st.integers(1, 30),
    chunk_bytes=st.sampled_from([8, 24, 100, 2**20]),
    rounds=st.integers(1, 4),
)
def test_the_outer_step_is_torchs_own_on_the_mean_pseudo_gradient(name, replicas, width, chunk_bytes, rounds):
    generator = torch.Generator().manual_seed(width)
    moves = torch.randn(rounds, replicas, width, generator=generator, dtype=torch.float64)
    start = torch.randn(width, generator=generator, dtype=torch.float64)

    parameter = torch.nn.Parameter(start.clone())
    reference = OUTER[name]([parameter])
    for move in moves:
        parameter.grad = move.mean(0)
        reference.step()

    def replica(exchange):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(start.clone())
        inner = torch.optim.SGD([model.weight], lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1, outer_optimizer=OUTER[name]):
            for move in moves:
                model.weight.grad = move[exchange.rank].clone()
                inner.step()
        return model.weight.detach()

    for weight in results(run_replicas(replica, in_process(replicas, chunk_bytes=chunk_bytes))):
        assert torch.allclose(weight, parameter.detach(), rtol=1e-9, atol=1e-11)


def test_the_exchange_makes_no_difference(tmp_path):
    def stores(uri):
        return [ObjectStoreExchange(open_store(uri), rank, 3, chunk_bytes=24) for rank in range(3)]

    options = {"sync_every": 4, "fragments": 2}
    reference = None
    for exchanges in (in_process(3), stores(str(tmp_path)), stores(f"memory://same/{next(_prefixes)}")):
        runs = results(run_replicas(lambda e: train(e, 10, adamw, **options), exchanges))
        reference = reference or runs
        for run, wanted in zip(runs, reference, strict=True):
            assert all(map(torch.equal, run, wanted))


def test_our_loop_over_a_manager_over_our_exchange_is_our_loop():
    options = {"sync_every": 4, "fragments": 2}
    direct = results(run_replicas(lambda e: train(e, 10, adamw, **options), in_process(3)))

    def through_a_manager(exchange):
        return train(ManagerExchange(MockManager(exchange)), 10, adamw, data=batches(exchange.rank, 10), **options)

    for run, wanted in zip(results(run_replicas(through_a_manager, in_process(3))), direct, strict=True):
        assert all(map(same, run, wanted))


class Refusing(MockManager):
    """A manager whose replicas refuse some commits, all alike."""

    def __init__(self, exchange, refused):
        super().__init__(exchange)
        self.attempts = 0
        self.refused = refused
        self.readable = []

    def should_commit(self):
        self.attempts += 1
        return self.attempts - 1 not in self.refused and super().should_commit()

    def disallow_state_dict_read(self):
        super().disallow_state_dict_read()
        self.readable.append(False)

    def allow_state_dict_read(self):
        super().allow_state_dict_read()
        self.readable.append(True)


def test_a_refused_commit_changes_nothing_but_the_model_which_goes_back():
    def replica(exchange):
        manager = Refusing(exchange, refused={2})
        net = Net()
        inner = sgd(net.parameters())
        reports, states = [], []
        outer = DiLoCo(net, inner, ManagerExchange(manager), sync_every=4, fragments=2, on_sync=reports.append)
        with outer:
            for batch in batches(exchange.rank, 12):
                loss_of(net, batch).backward()
                inner.step()
                inner.zero_grad()
                state = outer.state_dict()
                copies = [copy.clone() for fragment in state["fragments"] for copy in fragment["copy"]]
                momenta = [
                    entry["tensors"]["momentum_buffer"].clone()
                    for fragment in state["fragments"]
                    for entry in fragment["outer"]["ranges"]
                ]
                states.append((copies, momenta, flat(net)))
        assert manager.readable == [False, True] * manager.attempts
        return reports, states, outer.committed

    for reports, states, committed in results(run_replicas(replica, in_process(2))):
        # Every second step is an attempt; the third one, of the first fragment, is refused and comes again.
        assert [(report.fragment, report.committed) for report in reports] == [
            ("0", True), ("1", True), ("0", False), ("0", True), ("1", True), ("0", True), ("1", True),
        ]  # fmt: skip
        assert committed == 6
        before, after = states[4], states[5]
        assert all(map(torch.equal, before[0], after[0]))
        assert all(map(torch.equal, before[1], after[1]))
        size = len(after[0][0])
        assert torch.equal(after[2][:size], after[0][0]), "the fragment is back at the global copy"
        assert not torch.equal(before[2][:size], after[2][:size])
