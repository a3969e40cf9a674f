"""A contribution that counts as finite before it is computed is so, whatever the global copy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco_core import NonFiniteDeltaError
from diloco_core._arithmetic._layout import Piece, Rule
from diloco_core._arithmetic._sharded import Scratch, check_contribution
from diloco_core._model._partition import NamedTensor
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
_INTERESTING = [
    0.0,
    1.0,
    math.nan,
    math.inf,
    *(part * most**power for most in _LARGEST.values() for part in (0.5, 0.99, 1.0)
      for power in (0.5, 1.0)),
]  # fmt: skip


def _fragment(local, base, rule=Rule.OUTER):
    parameter = nn.Parameter(local)
    fragment = Fragment(
        "0",
        [NamedTensor("weight", parameter, rule)],
        OuterOptimizer(()),
        1,
    )
    fragment.begin()
    fragment.copy[0].copy_(base)
    return fragment


@given(
    st.sampled_from([torch.float16, torch.bfloat16, *_LARGEST]),
    st.lists(
        st.tuples(
            *2 * [st.sampled_from([*_INTERESTING, *(-v for v in _INTERESTING)]) | st.floats()]
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_it_holds_for_any_values(dtype, pairs):
    local = torch.tensor([local for local, _ in pairs], dtype=torch.float64).to(dtype)
    fragment = _fragment(local, torch.zeros(len(pairs)))
    base = torch.tensor([base for _, base in pairs], dtype=torch.float64).to(fragment.copy[0].dtype)
    fragment.copy[0].copy_(base.nan_to_num())  # the global copy is always finite
    piece = Piece(0, 0, len(pairs))
    if fragment.is_surely_finite(piece):
        contribution = fragment.contributed(piece, torch.empty_like(fragment.copy[0]))
        assert contribution.isfinite().all()


@pytest.mark.parametrize("dtype", _LARGEST)
def test_usual_values_are_known_to_be_finite(dtype):
    fragment = _fragment(torch.linspace(-1e9, 1e9, 70, dtype=dtype), 0.0)
    assert fragment.is_surely_finite(Piece(0, 0, 70))
    fragment.contributed = None  # is not needed
    check_contribution(fragment, 0, 1, 64, Scratch(64))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("value", "base"), [(math.nan, 0.0), (math.inf, 0.0), (-3e38, 3e38)], ids=str
)
def test_what_is_not_finite_is_found_where_it_is(value, base, rank):
    local = torch.ones(70)
    local[66] = value
    with pytest.raises(NonFiniteDeltaError, match="'weight'"):
        check_contribution(_fragment(local, base), 0, rank, 64, Scratch(64))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_buffers_only_values_that_are_used_are_checked(rank):
    local = torch.ones(70)
    local[66] = math.nan
    fragment = _fragment(local, 0.0, Rule.FIRST)
    if rank == 0:
        with pytest.raises(NonFiniteDeltaError, match="'weight'"):
            check_contribution(fragment, 0, rank, 64, Scratch(64))
    else:
        check_contribution(fragment, 0, rank, 64, Scratch(64))
