"""Test what a sync does with buffers: a declared policy, whatever their values and dtypes."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_lab import KINDS, exchanges, loop
from simulated import Fault, Schedule, simulate
from torch import nn
from training_lab import Clock

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    NonFiniteDeltaError,
    NonFiniteUpdateError,
    ReplicaLostError,
    Timing,
    in_process,
)
from diloco_core.testing import run_replicas

# Complex buffers are refused; all else that safetensors knows travels as it is.
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip


def hurried(kind):
    """Options with which a grace costs no real time, and nobody is ever given up."""
    clock = Clock()
    timing = Timing(sync_timeout=1e12, clock=clock, sleep=clock.sleep)
    return {} if kind in {"threads", "store"} else {"timing": timing}


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

    return run_replicas(replica, exchanges(kind, len(buffers), **options))


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same_bytes(a, b):
    return (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))


def model(lab):
    norms = nn.BatchNorm1d(3), nn.BatchNorm1d(4)
    return lab.fill(nn.Sequential(norms[0], nn.Linear(3, 4), norms[1], nn.Linear(4, 1)))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"aggregate": "trimmed"}, {"clip": "median"}, {"weight": "tokens"}]
)
def test_their_mean_is_plain_whatever_bounds_and_weighs_contributions(kind, options, lab):
    def replica(exchange):
        net, inner, outer, _ = loop(exchange, nn.BatchNorm1d(4), sync_every=1, **options)
        with outer:
            net.running_mean += (0.0, 3.0, 900.0)[exchange.rank]
            net.num_batches_tracked += 4 + exchange.rank
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if "weight" in options:
                outer.count_tokens(1 + exchange.rank)
            inner.step()
        return net.running_mean, net.num_batches_tracked.item()

    for mean, counter in lab.run(replica, exchanges(kind, 3)):
        assert torch.equal(mean, torch.full((4,), 301.0))
        assert counter == 4, "counters are those of rank 0"


def test_with_fragments_they_go_once_per_cycle_with_the_last(lab):
    def replica(exchange):
        net, inner, outer, _ = loop(exchange, model(lab), sync_every=2, fragments=2)
        seen = []
        with outer:
            for step in range(4):
                net[0].running_mean.fill_(10.0 * step + exchange.rank)
                lab.push(net, inner, exchange.rank, step)
                seen.append(net[0].running_mean[0].item())
        return seen

    assert lab.run(replica, in_process(2)) == [[0.0, 10.5, 20.0, 30.5], [1.0, 10.5, 21.0, 30.5]]


def test_the_first_rank_gives_the_initial_buffers(lab):
    def replica(exchange):
        net = model(lab)
        net[0].running_var.fill_(1.0 + exchange.rank)
        net[0].num_batches_tracked.fill_(5 - exchange.rank)
        with loop(exchange, net)[2]:
            return lab.values(net)

    runs = lab.run(replica, in_process(3))
    assert lab.identical(runs)
    assert runs[1]["0.running_var"].tolist() == [1.0, 1.0, 1.0]
    assert runs[2]["0.num_batches_tracked"].item() == 5


def test_complex_ones_are_refused_unless_they_are_left_alone():
    net = nn.Linear(1, 1)
    net.register_buffer("spectrum", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match="'spectrum' is complex"):
        loop(model=net)
    assert loop(model=net, buffers="none")


class Weighing:
    """A store that notes the size of every contribution."""

    def __init__(self, store, sizes):
        self._store, self._sizes = store, sizes

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        size = self._store.put(key, parts)
        if key.startswith("deltas/") and key.endswith(".safetensors"):
            self._sizes[int(key.split("/")[1]), int(key.split("/")[2][:5])] = size
        return size


class TestUnchanged:
    """Buffers that a replica has not changed since the last sync are not in its contribution."""

    def sizes(self, lab, kind, changes, policy="mean", dtype=torch.bool):
        """Sizes of contributions if buffers are changed at some (rank, sync); and the values."""
        sizes = {}

        def replica(exchange):
            net = with_buffers(lab, [torch.zeros(2**14).to(dtype), torch.ones(3)])
            inner = torch.optim.SGD(net.parameters(), lr=1.0)
            seen = []
            with DiLoCo(net, inner, exchange, sync_every=1, buffers=policy):
                for sync in range(4):
                    if (exchange.rank, sync) in changes:
                        net.buffer0[sync] = True
                    lab.push(net, inner, exchange.rank, sync)
                    seen.append(net.buffer0.clone())
            return [*seen, *lab.values(net).values()]

        replicas = exchanges(kind, 2)
        for exchange in replicas:
            exchange._store.store = exchange.store = Weighing(exchange.store, sizes)
        runs = lab.run(replica, replicas)
        assert all(same_bytes(a, b) for a, b in zip(*runs, strict=True))
        return [[sizes[1 + sync, rank] for rank in range(2)] for sync in range(4)], runs[0]

    @pytest.mark.sampled
    @pytest.mark.parametrize("policy", ["mean", "rank0"])
    @pytest.mark.parametrize("kind", ["store", "sharded", "gather"])
    def test_they_are_sent_by_those_who_changed_them(self, lab, kind, policy):
        uploads, values = self.sizes(lab, kind, {(0, 1), (0, 3), (1, 3)}, policy)
        mask = 2**14 if kind != "store" else 2**13  # each sends the other's half
        for sync, changed in enumerate([(), (0,), (), (0, 1)]):
            for rank, size in enumerate(uploads[sync]):
                sent = rank in changed and not (kind == "store" and rank == 1)  # rank 0's counts
                assert (size > mask) is sent, (sync, rank, size)
                assert size < 2000 + mask
        assert values[3].nonzero().flatten().tolist() == [1, 3]

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", ["store", "sharded", "gather"])
    def test_one_replicas_change_counts_for_its_part(self, lab, kind):
        _, values = self.sizes(lab, kind, {(1, 2)}, dtype=torch.float32)
        assert values[1].max() == 0
        assert values[2].nonzero().flatten().tolist() == [2]
        assert values[2][2] == 0.5

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_the_rounding_of_a_mean_is_no_change(self, lab, dtype):
        """The mean lies between two values of the model's dtype, and stays there."""
        ulp = torch.finfo(dtype).eps

        def replica(exchange):
            net = with_buffers(lab, [torch.ones(3, dtype=dtype)])
            inner = torch.optim.SGD(net.parameters(), lr=1.0)
            copies = []
            with DiLoCo(net, inner, exchange, sync_every=1) as outer:
                for sync in range(5):
                    for rank, at, place in ((0, 1, 1), (1, 3, 2)):
                        if (exchange.rank, sync) == (rank, at):
                            net.buffer0[place] += ulp
                    lab.push(net, inner, exchange.rank, sync)
                    held = outer.state_dict()["fragments"][0]["copy"]
                    copies += [copy.tolist() for copy in held if len(copy) == 3]
            return copies

        third = float(torch.tensor(1 + ulp / 3))
        wanted = [[1, 1, 1], *2 * [[1, third, 1]], *2 * [[1, third, third]]]
        for kind in KINDS:
            for copies in lab.run(replica, exchanges(kind, 3)):
                close = torch.isclose(torch.tensor(copies), torch.tensor(wanted), rtol=2e-7, atol=0)
                assert close.all(), kind
                assert copies[1] == copies[2]
                assert copies[3] == copies[4]

    @pytest.mark.parametrize("topology", ["sharded", "gather"])
    def test_whatever_goes_wrong(self, topology):
        """Killed, late and repeated replicas come to the same values after every sync."""

        def train(node):
            net = nn.ParameterDict({"weight": torch.zeros(40)})
            net.register_buffer("mask", torch.zeros(30, dtype=torch.bool))
            net.register_buffer("mean", torch.zeros(20))
            inner = torch.optim.SGD(net.parameters(), lr=1.0)

            def seen(report):
                if report.committed:
                    copies = [copy.clone() for copy in outer.state_dict()["fragments"][0]["copy"]]
                    copies_after.setdefault(outer.committed, []).append(copies)

            with DiLoCo(net, inner, node.exchange, sync_every=1, on_sync=seen) as outer:
                while outer.committed < 6:
                    node.sleep(1.0)
                    step = outer.inner_steps
                    if (step + node.rank) % 3 == 0:
                        net.mask[step % 30] = node.rank % 2 == 0
                        net.mean[step % 20] = node.rank + step
                    net["weight"].grad = torch.full((40,), (1.0 + node.rank) / 16)
                    inner.step()

        kinds = ("kill before", "tear", "lose request", "delay", "repeat")
        published = 2 if topology == "gather" else None
        settings = Elastic(2, grace=8.0, topology=topology, publish_every=published)
        for number in range(6):
            copies_after, chance = {}, random.Random(number)
            faults = [
                Fault(chance.randrange(3), 1, chance.randint(10, 120), chance.choice(kinds), 60.0)
                for _ in range(3)
            ]
            schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.2)
            outcome = simulate(train, schedule, settings, limit=5000.0)
            assert outcome.finished, outcome.errors()
            for copies in copies_after.values():
                for other in copies:
                    assert all(same_bytes(a, b) for a, b in zip(copies[0], other, strict=True))


INF, NAN = float("inf"), float("nan")


class TestWhatIsNotFinite:
    @pytest.mark.sampled
    @pytest.mark.parametrize("policy", ["mean", "rank0"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_all_replicas_hold_stays_as_it_is(self, lab, kind, policy):
        """A causal mask; and values whose sum over three replicas overflows or is rounded."""
        mask = torch.full((4, 4), -INF).triu(1)
        odd = torch.tensor([NAN, INF, 3e38, 0.1, -0.0])
        for buffers in synced(lab, kind, [[mask, odd]] * 3, policy):
            assert same_bytes(buffers[0], mask)
            assert same_bytes(buffers[1], odd)

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", KINDS)
    def test_infinity_is_a_number_like_others(self, lab, kind):
        """A running maximum begins at -inf, and not everybody has seen something."""
        start, seen = torch.tensor([-INF, -INF]), torch.tensor([-INF, 2.0])
        for (buffer,) in synced(lab, kind, [[start]] * 2, later=[[seen], [seen]]):
            assert buffer.tolist() == [-INF, 2.0]
        for (buffer,) in synced(lab, kind, [[start]] * 2, later=[[seen], [start]]):
            assert buffer.tolist() == [-INF, -INF]

    @pytest.mark.sampled
    @pytest.mark.parametrize("policy", ["mean", "rank0"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_nan_that_is_new_is_refused_before_it_is_sent(self, lab, kind, policy):
        before, after = torch.tensor([1.0, NAN]), torch.tensor([NAN, NAN])
        first, second = synced(
            lab, kind, [[before]] * 2, policy, later=[[after], [before]], least=1
        )
        assert isinstance(first, NonFiniteDeltaError)
        assert (first.tensor, first.rank) == ("buffer0", 0)
        if kind in {"threads", "store"}:
            assert isinstance(second, ReplicaLostError)
        else:
            assert same_bytes(second[0], before)

    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize(("one", "other"), [(INF, -INF), ("most", "almost")])
    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_infinite_or_undefined_is_made_of_them(self, lab, kind, one, other, dtype):
        most = torch.finfo(dtype).max
        values = {"most": most, "almost": most * 0.99}
        later = [
            [torch.tensor([1.0, values.get(value, value)], dtype=dtype)] for value in (one, other)
        ]
        ends = synced(lab, kind, [[torch.ones(2, dtype=dtype)]] * 2, later=later, **hurried(kind))
        owners = [error for error in ends if isinstance(error, NonFiniteUpdateError)]
        assert len(owners) == (1 if kind in {"threads", "store"} else 2)
        assert all(isinstance(error, (NonFiniteUpdateError, ReplicaLostError)) for error in ends)
        assert {(error.tensor, error.outer_lr) for error in owners} == {("buffer0", None)}
        assert "the mean over the replicas makes tensor 'buffer0' NaN or infinite" in str(owners[0])


class TestDtypes:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=5, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=5),
        st.integers(0, 2**31),
    )
    def test_every_dtype_comes_from_rank_0_as_it_is(self, lab, kind, described, seed):
        generator = torch.Generator().manual_seed(seed)

        def buffer(dtype, size, rank):
            if dtype is torch.bool:
                return torch.rand(size, generator=generator) < 0.5
            if dtype.is_floating_point:  # other values at other ranks, and no NaN
                return torch.randn(size, generator=generator).to(dtype)
            return torch.randint(
                0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8
            ).view(dtype)

        first, second = (
            [[buffer(*one, rank) for one in described] for rank in range(3)] for _ in range(2)
        )
        for buffers in synced(lab, kind, first, "rank0", later=second):
            assert all(same_bytes(a, b) for a, b in zip(buffers, second[0], strict=True))

    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
    def test_every_floating_point_dtype_has_a_mean(self, lab, dtype):
        later = [[torch.tensor([2.0, 1.0 + 2 * rank]).to(dtype)] for rank in range(2)]
        for (buffer,) in synced(lab, "store", [[torch.ones(2).to(dtype)]] * 2, later=later):
            assert buffer.float().tolist() == [2.0, 2.0]
            assert buffer.dtype is dtype

    @pytest.mark.parametrize(
        ("make", "word"),
        [
            (lambda: torch.ones(2).to_sparse(), "sparse_coo"),
            (lambda: torch.ones(2, device="meta"), "device meta"),
            (lambda: torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1"),
        ],
    )
    def test_what_has_no_bytes_of_its_own_is_refused_by_name(self, make, word):
        net = nn.Linear(1, 1)
        net.register_buffer("odd", make())
        with pytest.raises(ConfigurationError, match=rf"buffer 'odd' is .*{word}"):
            loop(model=net)
