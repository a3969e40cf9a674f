"""A store that is away for less than sync_timeout is waited out, and nobody counts as lost; one
that stays away is named.
"""

from dataclasses import dataclass

import keys_lab
import pytest
import torch
from strict_lab import Means, Run
from training_lab import fill, identical, push, values

from diloco_core import DiLoCo, ReplicaLostError, StoreUnavailableError

LIMITS = {"sync_timeout": 1000.0, "beat_interval": 10.0, "lost_after": 90.0}


def away(start, seconds):
    """Let the store be away for a while, for all processes; to be called before each request."""

    def before(process, *_):
        if start <= process.clock() < start + seconds:
            raise StoreUnavailableError("the store is away")

    return before


@dataclass
class Slow(Run):
    """Three replicas, whose steps take 50, 110 and 170 s."""

    def train(self, exchange, until):
        model = fill(torch.nn.Linear(4, 3))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2) as outer:
            while outer.inner_steps < until:
                exchange.store.sleep(50.0 + 60.0 * exchange.rank)
                push(model, inner, exchange.rank, outer.inner_steps)
        return values(model)


def train(new_store, start, seconds):
    """What such replicas come to whose store is away for a while, and when the last one ended."""
    limits = dict.fromkeys(range(3), LIMITS)
    run = Slow(3, limits=limits, before=away(start, seconds), store=new_store())
    results = run.live(until=6)
    return results, max(run.ended.values())


@pytest.mark.parametrize("start", [0.5, 60.0, 102.0, 250.0])
def test_a_short_outage_is_waited_out_and_nobody_is_lost(new_store, start):
    wanted, _ = train(new_store, 1e9, 0.0)
    found, ended = train(new_store, start, 0.9 * LIMITS["sync_timeout"])
    assert identical([*wanted, *found]), found
    assert ended > start + 0.9 * LIMITS["sync_timeout"]


@pytest.mark.parametrize("start", [60.0, 250.0])
def test_a_long_outage_is_an_error_of_the_store(new_store, start):
    results, ended = train(new_store, start, 3 * LIMITS["sync_timeout"])
    assert all(isinstance(result, StoreUnavailableError) for result in results), results
    # Telling the others is not waited for once more.
    assert ended < start + 1.5 * LIMITS["sync_timeout"]


class TestObserver:
    """Rank 0 waits for rank 1, which has died without a word, and nobody waits for it to return."""

    def observe(self, new_store, outage):
        """When rank 0 calls rank 1 lost."""

        def before(process, request, key):
            outage(process)
            if process.rank and keys_lab.of("contribution", sync=2)(key):
                process.die()

        run = Means(2, limits={0: LIMITS, 1: LIMITS}, before=before, store=new_store())
        result, _ = run.live(until=2)
        with pytest.raises(ReplicaLostError, match=r"rank 1 has shown no sign of life for 9\d s"):
            raise result
        return run.ended[0]

    def test_time_without_the_store_is_not_counted(self, new_store):
        """And when it is back, all get the whole time again."""
        assert 1070.0 < self.observe(new_store, away(80.0, 900.0)) < 1100.0

    def test_many_short_outages_do_not_hide_a_death(self, new_store):
        """They are a quarter of the time."""

        def outage(process):
            if process.clock() % 20.0 < 5.0 and process.clock() > 5.0:
                raise StoreUnavailableError("the store is away")

        assert 100.0 < self.observe(new_store, outage) < 140.0
