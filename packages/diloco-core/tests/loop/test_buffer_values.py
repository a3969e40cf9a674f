"""Which values buffers may have, and in which dtypes they are sent."""

import pytest
import torch
from buffers_lab import DTYPES, KINDS, same_bytes, synced
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_lab import loop
from torch import nn

from diloco_core import (
    ConfigurationError,
    NonFiniteDeltaError,
    NonFiniteUpdateError,
    ReplicaLostError,
)

INF, NAN = float("inf"), float("nan")


class TestWhatIsNotFinite:
    @pytest.mark.parametrize("policy", ["mean", "rank0"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_all_replicas_hold_stays_as_it_is(self, lab, kind, policy):
        """A causal mask; and values whose sum over three replicas overflows or is rounded."""
        mask = torch.full((4, 4), -INF).triu(1)
        odd = torch.tensor([NAN, INF, 3e38, 0.1, -0.0])
        for found in synced(lab, kind, [[mask, odd]] * 3, policy):
            assert same_bytes(found[0], mask)
            assert same_bytes(found[1], odd)

    @pytest.mark.parametrize("kind", KINDS)
    def test_infinity_is_a_number_like_others(self, lab, kind):
        """A running maximum begins at -inf, and not everybody has seen something."""
        start, seen = torch.tensor([-INF, -INF]), torch.tensor([-INF, 2.0])
        for (found,) in synced(lab, kind, [[start]] * 2, later=[[seen], [seen]]):
            assert found.tolist() == [-INF, 2.0]
        for (found,) in synced(lab, kind, [[start]] * 2, later=[[seen], [start]]):
            assert found.tolist() == [-INF, -INF]

    @pytest.mark.parametrize("policy", ["mean", "rank0"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_nan_that_is_new_is_refused_before_it_is_sent(self, lab, kind, policy):
        before, after = torch.tensor([1.0, NAN]), torch.tensor([NAN, NAN])
        first, second = synced(
            lab, kind, [[before]] * 2, policy, later=[[after], [before]], least=1
        )
        assert isinstance(first, NonFiniteDeltaError)
        assert (first.tensor, first.rank) == ("buffer0", 0)
        if kind in {"threads", "fixed"}:
            assert isinstance(second, ReplicaLostError)
        else:
            assert same_bytes(second[0], before)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize(("one", "other"), [(INF, -INF), ("most", "almost")])
    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_infinite_or_undefined_is_made_of_them(self, lab, kind, one, other, dtype):
        most = torch.finfo(dtype).max
        values = {"most": most, "almost": most * 0.99}
        later = [
            [torch.tensor([1.0, values.get(value, value)], dtype=dtype)] for value in (one, other)
        ]
        found = synced(lab, kind, [[torch.ones(2, dtype=dtype)]] * 2, later=later, hurried=True)
        owners = [error for error in found if isinstance(error, NonFiniteUpdateError)]
        assert len(owners) == (1 if kind in {"threads", "fixed"} else 2)
        assert all(isinstance(error, (NonFiniteUpdateError, ReplicaLostError)) for error in found)
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
        for found in synced(lab, kind, first, "rank0", later=second):
            assert all(same_bytes(a, b) for a, b in zip(found, second[0], strict=True))

    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
    def test_every_floating_point_dtype_has_a_mean(self, lab, dtype):
        later = [[torch.tensor([2.0, 1.0 + 2 * rank]).to(dtype)] for rank in range(2)]
        for (found,) in synced(lab, "fixed", [[torch.ones(2).to(dtype)]] * 2, later=later):
            assert found.float().tolist() == [2.0, 2.0]
            assert found.dtype is dtype

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
