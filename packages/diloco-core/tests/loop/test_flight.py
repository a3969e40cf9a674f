"""Which thread begins a sync that a replica does not wait for."""

import threading
from dataclasses import replace

import pytest
import torch

from diloco_core import DiLoCo, in_process


@pytest.mark.parametrize("behind", [True, False])
def test_where_another_thread_may_not_begin_a_sync_the_one_that_trains_does(behind, monkeypatch):
    (exchange,) = in_process(1)
    begin, threads = exchange.begin, []

    def noted(*arguments, **options):
        threads.append(threading.get_ident())
        return begin(*arguments, **options)

    exchange.support = replace(exchange.support, begins_behind=behind)
    monkeypatch.setattr(exchange, "begin", noted)
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=2, delay=1) as outer:
        while outer.committed < 3:
            model(torch.ones(1, 2)).sum().backward()
            inner.step()
    # The first one shares the values with which all begin, and the replica waits for it.
    own = [thread == threading.get_ident() for thread in threads]
    assert own[:3] == [True, not behind, not behind]
