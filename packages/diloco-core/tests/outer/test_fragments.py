"""Test what a fragment says of values before they are sent: whether they are finite, and there."""

import math

import pytest
import torch
from torch import nn

from diloco_core import NonFiniteUpdateError
from diloco_core._arithmetic._layout import Piece, Rule
from diloco_core._arithmetic._sharded import may_carry
from diloco_core._model._partition import Buffers, NamedTensor, split
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._wire._delta import DeltaFormat

# The largest values that are rounded to something finite, and the next ones.
EDGES = {
    torch.float16: (65519.99609375, 65520.0),
    torch.bfloat16: (3.3961773292304957e38, 3.3961775292304601e38),
    torch.float32: (torch.finfo(torch.float32).max, math.inf),
    torch.float64: (torch.finfo(torch.float64).max, math.inf),
}


def fragment_of(*values, base=0.0, rule=Rule.OUTER):
    names = ["weight"] if len(values) == 1 else ["first", "weight"]
    tensors = [
        NamedTensor(name, nn.Parameter(local), rule)
        for name, local in zip(names, values, strict=True)
    ]
    fragment = Fragment("0", tensors, OuterOptimizer(()), 1)
    fragment.begin()
    fragment.copy[0].copy_(torch.as_tensor(base))
    return fragment


@pytest.mark.parametrize("others", [1.0, 60000.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", EDGES)
def test_the_edge_is_where_rounding_puts_it(dtype, sign, others):
    """The global copy may exceed the largest value of the model's dtype if it is rounded down."""
    fragment = fragment_of(torch.ones(3, dtype=dtype), torch.ones(9, dtype=dtype))
    piece, values = Piece(0, 0, 12), torch.full_like(fragment.copy[0], others)
    for value, fits in zip((*EDGES[dtype], math.nan), (True, False, False), strict=True):
        values[7] = sign * value
        assert bool(values.to(dtype).isfinite().all()) is fits
        if fits:
            fragment.check_update(piece, values, 3)
            continue
        with pytest.raises(NonFiniteUpdateError) as caught:
            fragment.check_update(piece, values, 3)
        assert (caught.value.tensor, caught.value.sync) == ("weight", 3)


def test_what_takes_an_outer_step_is_in_every_contribution():
    """Buffers may be left out, in any combination; nothing else is read."""
    (tensors,) = split(nn.BatchNorm1d(3), 1, Buffers.MEAN)
    fragment = Fragment("0", tensors, OuterOptimizer(()), 1)
    assert [str(group.rule) for group in fragment.layout.groups] == ["first", "mean", "outer"]
    allowed = [4, 5, 6, 7]
    assert [groups for groups in range(20) if may_carry(fragment.layout, groups)] == allowed
    found = DeltaFormat(fragment)
    assert len({found.size(groups) for groups in allowed}) == 4
    assert found.size(3) is None
    assert found.size(12) is None
