"""torch's default random generator, where several replicas share a process."""

import torch

from diloco_core._generators import random_state, set_random_state, undisturbed
from diloco_core._outer._groups import try_out
from diloco_core._outer._optimizer import OuterOptimizer, outer_factory
from diloco_core._terms._terms import OuterGroup


def test_what_is_drawn_inside_changes_nothing():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    with undisturbed():
        torch.rand(5)
    assert torch.equal(torch.rand(2), wanted)


class Counted:
    """A lock that counts how often it was taken."""

    def __init__(self):
        self.taken = 0

    def __enter__(self):
        self.taken += 1

    def __exit__(self, *exc):
        pass


def test_whoever_reads_or_sets_the_state_takes_turns(monkeypatch):
    """Two threads in torch at the same time have been seen to wait for each other for ever."""
    factory = outer_factory(None, 0.5, 0.9, True)
    state = random_state()
    for use in (
        random_state,
        lambda: set_random_state(state),
        lambda: OuterOptimizer([OuterGroup(factory)]).tensors_kept(),
        lambda: try_out(factory),
    ):
        turns = Counted()
        monkeypatch.setattr("diloco_core._generators.TURNS", turns)
        monkeypatch.setattr("diloco_core._generators.TURNS", turns)
        use()
        assert turns.taken == 1
