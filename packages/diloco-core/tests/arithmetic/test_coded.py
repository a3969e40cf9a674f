"""Encoded updates: what is published, and what everybody adopts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_core._arithmetic._coded import encode_update
from diloco_core._codecs._codec import is_sparse
from diloco_core._codecs._named import CODECS

# Sparse codecs are refused for state.
LOSSY = [
    name for name, codec in CODECS.items() if name not in {"plain", "fp32"} and not is_sparse(codec)
]


def normal(seed, numel, scale=1.0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(scale)


def decoded(codec, data, like):
    out = torch.empty_like(like)
    codec.decode(data, out)
    return out


@pytest.mark.parametrize("name", [name for name in CODECS if name != "plain"])
@given(st.integers(0, 10**6), st.integers(1, 700), st.integers(-8, 3))
def test_everybody_comes_to_the_owners_values(name, seed, numel, exponent):
    """What is stored gives all replicas the owner's values and residual, bit by bit, over several
    syncs.
    """
    codec = CODECS[name]
    owner = normal(seed, numel)
    other, residual, others_residual = owner.clone(), None, torch.zeros(numel)
    for sync in range(4):
        old, step = owner.clone(), normal(seed + sync + 1, numel, 10.0**exponent)
        owner += step
        wanted = owner - old + others_residual
        update = encode_update(codec, old, owner, residual)
        sent = decoded(codec, update.data, old)
        other += sent
        assert torch.equal(owner, other)
        others_residual = decoded(codec, update.left, old)
        residual = update.residual
        assert torch.equal(residual, others_residual)
        assert torch.equal(others_residual, decoded(codec, codec.encode(wanted - sent), old))


@pytest.mark.parametrize("name", LOSSY)
def test_small_values_arrive_in_the_end(name):
    """Without the residual, values far below the largest of their block would never move."""
    codec = CODECS[name]
    step = torch.full((256,), 1e-3)
    step[0] = 1.0
    values, residual = torch.zeros(256), None
    for _ in range(2000):
        old = values.clone()
        values += step
        residual = encode_update(codec, old, values, residual).residual
    off = (values[1:].double().mean() / 2.0 - 1.0).abs().item()
    assert off < (0.35 if name == "e2m1" else 0.05)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_encoded(wrong):
    old, new = torch.zeros(300), torch.ones(300)
    new[7] = wrong
    assert encode_update(CODECS["int8"], old, new, None) is None
    assert not new.isfinite().all()


def test_a_difference_that_overflows_is_not_encoded():
    old, new = torch.full((32,), -3e38), torch.full((32,), 3e38)
    assert encode_update(CODECS["int8"], old, new, None) is None
    assert new.isinf().all()


def test_a_sum_that_overflows_is_encoded():
    """The quick check adds all values up; only the values themselves must be finite."""
    old, new = torch.zeros(32), torch.full((32,), 3e38)
    assert encode_update(CODECS["int8"], old, new, None) is not None
