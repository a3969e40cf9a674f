"""The quick way to the largest magnitudes finds what torch.topk finds, whatever the values are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_core._codecs import _largest
from diloco_core._codecs._largest import largest

NUMEL = 256
#: With one value in 64, in 32 and in 8: for the last ones, the groups are as small as they get.
COUNTS = [4, 8, 32, 64]


WAYS = pytest.mark.parametrize("keys", [True, False], ids=["by keys", "by groups"])


def found_by(keys, rows, k):
    """In one of the two ways, whichever is the quicker one here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_largest, "_PARTITION_IS_QUICK", keys)
        return checked(rows, *largest(rows, k))


def checked(rows, indices, values):
    """The indices, after a look at the values that came with them."""
    wanted = rows.numpy().reshape(-1)[indices]
    assert np.array_equal(values.view(np.int32), wanted.view(np.int32))
    return indices


def by_topk(rows, k):
    order = rows.abs().topk(k, 1, sorted=False).indices.sort(1).values
    return (order + torch.arange(len(rows)).view(-1, 1) * rows.shape[1]).numpy()


@st.composite
def matrices(draw):
    """Rows of many kinds side by side: few different values, so many ties; steps; one cluster; what
    is not finite; numbers that differ in their lowest bits only.
    """
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for kind in draw(st.lists(st.integers(0, 7), min_size=1, max_size=6)):
        values = torch.randn(NUMEL, generator=generator)
        if kind == 1:
            values = values.round()
        elif kind == 2:
            values = torch.where(torch.rand(NUMEL, generator=generator) < 0.03, values, -0.0)
        elif kind == 3:
            values = torch.arange(NUMEL) - 100.0
        elif kind == 4:
            values[::16] *= 1e6  # all in few groups
        elif kind == 5:
            values = torch.full((NUMEL,), 1e-40)
        elif kind == 6:
            values[draw(st.integers(0, NUMEL - 1))] = draw(st.sampled_from([torch.inf, -torch.inf]))
        elif kind == 7:
            order = torch.randperm(NUMEL, generator=generator, dtype=torch.int32)
            values = (order * draw(st.sampled_from([1, 64])) + 0x3F800000).view(torch.float32)
        rows.append(values)
    return torch.stack(rows)


@WAYS
@pytest.mark.parametrize("k", COUNTS)
@given(rows=matrices())
def test_it_finds_what_topk_finds(keys, k, rows):
    before = rows.clone()
    found = found_by(keys, rows, k)
    assert np.array_equal(found, by_topk(rows, k))
    assert torch.equal(rows.view(torch.int32), before.view(torch.int32))


@WAYS
@pytest.mark.parametrize("numel", [1, 2, 15, 100, NUMEL - 1, 5000])
def test_rows_of_any_length(keys, numel):
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    for k in {1, numel // 3 + 1, numel}:
        assert np.array_equal(found_by(keys, rows, k), by_topk(rows, k))


@pytest.mark.parametrize("find", [_largest._by_keys, _largest._by_groups])
@pytest.mark.parametrize("k", [64, 128])
def test_values_without_ties_need_no_sorting(find, k):
    rows = torch.stack([torch.randperm(4096, generator=torch.Generator().manual_seed(k))]).float()
    chosen, values, clear = find(rows, k)
    assert clear.all()
    assert np.array_equal(checked(rows, chosen, values).reshape(1, k), by_topk(rows, k))


@WAYS
def test_nan_is_larger_than_all_numbers(keys):
    """It must be sent: a contribution that holds it must not look like one that does not."""
    rows = torch.randn(3, NUMEL, generator=torch.Generator().manual_seed(1))
    rows[1, 77] = torch.nan
    rows[2, 5] = torch.inf
    found = found_by(keys, rows, 4)
    assert NUMEL + 77 in found[1]
    assert 2 * NUMEL + 5 in found[2]


@WAYS
def test_an_equal_value_whose_key_is_smaller_is_not_passed_over(keys):
    """All other keys between those of two equal values belong to smaller ones, and no more than the
    larger keys are looked at.
    """
    bits = torch.full((1, NUMEL), 0x3F800000, dtype=torch.int32)
    bits[0, [0, -1]] = 0x3F800FFF
    rows = bits.view(torch.float32)
    assert np.array_equal(found_by(keys, rows, 1), by_topk(rows, 1))
    rows = rows.flip(1).contiguous()
    assert np.array_equal(found_by(keys, rows, 1), by_topk(rows, 1))
