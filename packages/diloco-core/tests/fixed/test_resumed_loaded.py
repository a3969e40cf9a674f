"""A fixed run that was begun with a loaded outer loop is resumed as any other: nothing that was
loaded is lost.
"""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from strict_lab import Run
from training_lab import identical, push, values

from diloco_core import DiLoCo


@dataclass
class Loaded(Run):
    """A run that goes on from a checkpoint: first one incarnation that makes it, then incarnations
    on another prefix.
    """

    outer: dict = field(default_factory=dict)
    saved: dict = field(default_factory=dict)
    spare: int = 0
    asks: float = 0.0

    def train(self, exchange, until, load=False):
        net = self.net()
        inner = torch.optim.Adam(net.parameters(), lr=0.1)
        options = {"sync_every": 3 * self.fragments, "fragments": self.fragments, **self.outer}
        outer = DiLoCo(net, inner, exchange, flush="none", save_inner_every=10, **options)
        if load:
            parts = (net, inner, outer)
            for part, state in zip(parts, self.saved[exchange.rank], strict=True):
                part.load_state_dict(copy.deepcopy(state))
        with outer:
            self.behind += outer.batches_to_skip
            while outer.committed < until:
                if self.asks and outer.committed == 2 and not load:
                    outer.set_outer_lr(self.asks)
                push(net, inner, exchange.rank, outer.inner_steps)
            if not load and not self.saved.get(exchange.rank):
                for _ in range(self.spare):
                    push(net, inner, exchange.rank, outer.inner_steps)
                parts = (net, inner, outer)
                self.saved[exchange.rank] = copy.deepcopy([part.state_dict() for part in parts])
        return values(net)


OUTER = {
    "momentum": {},
    "Adam": {"outer_optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
}


CASES = [("momentum", 1, 2), ("Adam", 1, 0), ("momentum", 2, 0), ("Adam", 2, 2)]


@pytest.mark.parametrize(("outer", "fragments", "spare"), CASES)
def test_it_ends_as_one_that_was_not_stopped(outer, fragments, spare, new_store):
    """Stopped before its first sync, before each fragment has had one, and later; loaded between
    syncs, and in a period.
    """
    first = Loaded(2, fragments, outer=OUTER[outer], spare=spare)
    first.live(until=3)
    wanted = Loaded(2, fragments, outer=OUTER[outer], saved=first.saved).live(until=7, load=True)
    assert all(isinstance(held, dict) for held in wanted), wanted
    for stop in range(3, 3 + fragments + 2):
        run = Loaded(2, fragments, outer=OUTER[outer], saved=first.saved, store=new_store())
        run.live(until=stop, load=True)
        held = run.live(until=7, resume=True)
        assert identical([*held, *wanted]), stop
        assert run.behind == 0


def test_it_keeps_the_learning_rate_that_was_asked_for(new_store):
    """Stopped before its first sync, it has no other record of that rate than its initial state."""
    first = Loaded(2, asks=0.125)
    first.live(until=3)
    wanted = Loaded(2, saved=first.saved).live(until=5, load=True)
    run = Loaded(2, saved=first.saved, store=new_store())
    run.live(until=3, load=True)
    held = run.live(until=5, resume=True)
    assert identical([*held, *wanted])
    plain = Loaded(2)
    plain.live(until=3)
    assert not identical([*Loaded(2, saved=plain.saved).live(until=5, load=True), *wanted])
