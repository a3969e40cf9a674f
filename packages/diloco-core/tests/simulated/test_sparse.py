"""Values that the simulator takes for those of a sparse codec: any of equal ones, no others."""

import pytest
import torch

from simulated import decoded, sent_of

CODEC = "topk64"  # of 300 values it sends 5
SENT = (0.75, 0.75, -0.75, 0.5, -0.5)


def read_of(places):
    """Return what is read where these values were sent, in their order, at these places."""
    values = torch.zeros(300)
    for place, value in zip(places, SENT, strict=True):
        values[place] = value
    return decoded(CODEC, values)


def offered():
    """Three large values, and many that are equal but for their signs."""
    values = torch.full((300,), 0.25)
    values[[3, 50, 299]] = torch.tensor(SENT[:3])
    values[100:120] = 0.5
    values[200:220] = -0.5
    return values


@pytest.mark.parametrize("places", [(3, 50, 299, 100, 200), (3, 50, 299, 119, 211)])
def test_any_of_equal_values(places):
    read = read_of(places)
    assert int((read != 0).sum()) == 5
    assert sent_of(CODEC, offered(), read) is read


@pytest.mark.parametrize(
    "wrong",
    [
        lambda read: read * 2,
        lambda read: -read,
        lambda read: read * 0,
        lambda read: read.roll(1),
        lambda read: read.index_fill(0, torch.tensor([3]), 0.0),
        lambda read: read.index_fill(0, torch.tensor([4]), 0.25),
        lambda read: decoded(CODEC, offered().where(offered().abs() == 0.25, 0.0)),
    ],
    ids=["doubled", "negative", "nothing", "elsewhere", "one less", "one more", "smaller ones"],
)
def test_nothing_else(wrong):
    read = wrong(read_of((3, 50, 299, 100, 200)))
    found = sent_of(CODEC, offered(), read)
    assert float((found - read).abs().max()) > 0.1
    assert int((found != 0).sum()) == 5
    assert found[[3, 50, 299]].sign().tolist() == [1.0, 1.0, -1.0]
