"""An elastic run of several fragments in which a rank dies between the syncs of two of them."""

from contextlib import suppress

import torch

from diloco_core import DiLoCo, Elastic, StoreExchange
from diloco_core._store._open import open_store


def incarnation(lab, steps, fragments=2):
    """One incarnation of a run's only rank, which dies after so many inner steps."""
    store = open_store(f"memory://between-fragments/{fragments}")
    net = lab.fill(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    exchange = StoreExchange(store, 0, 1, Elastic(1, grace=1.0))
    options = {"sync_every": 2 * fragments, "fragments": fragments, "save_inner_every": 1}
    with suppress(KeyboardInterrupt), DiLoCo(net, inner, exchange, **options) as outer:
        for _ in range(steps):
            lab.push(net, inner, 0, outer.inner_steps)
        raise KeyboardInterrupt


def test_the_next_incarnation_says_which_steps_are_lost(lab, caplog):
    incarnation(lab, 7)
    assert "are lost" not in caplog.text
    incarnation(lab, 0)
    (record,) = [record for record in caplog.records if "are lost" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert "rank 0: an earlier incarnation of this rank ended between" in record.getMessage()
    assert "do not hold them: 2 of fragment 1." in record.getMessage()


def test_one_fragment_loses_none_that_are_not_repeated(lab, caplog):
    incarnation(lab, 3, fragments=1)
    incarnation(lab, 0, fragments=1)
    assert "are lost" not in caplog.text
