"""A commit that is refused changes nothing but the model, which goes back to the global copy.

What the model holds after every step is among the formulas of the delay.
"""

import copy
from itertools import pairwise

import pytest
import torch
from loop_lab import Refusing, live, loop
from torch import nn

from diloco_core import ManagerExchange, in_process


class Noting(Refusing):
    """Notes when the model may be read."""

    def __init__(self, exchange, refused):
        super().__init__(exchange, refused)
        self.reading = []

    def disallow_state_dict_read(self):
        super().disallow_state_dict_read()
        self.reading.append("stop")

    def allow_state_dict_read(self):
        super().allow_state_dict_read()
        self.reading.append("go")


def equal(a, b):
    """Whether two states are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


OUTER = {"Nesterov": {}, "Adam": {"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("refused", [{0}, {4}, {3, 4, 7}])
def test_global_copies_and_outer_states_stay_to_the_bit(lab, outer, refused):
    def replica(exchange):
        manager, seen = Noting(exchange, refused), []

        def note(report):
            state = copy.deepcopy(made.state_dict()["fragments"])
            seen.append((report, state))
            if report:
                held = nn.utils.parameters_to_vector(model[int(report.fragment)].parameters())
                assert torch.equal(held, state[int(report.fragment)]["copy"][0])

        model = lab.fill(nn.ModuleList(nn.Linear(3, 4) for _ in range(3)))
        options = {"sync_every": 6, "fragments": 3, "on_sync": note, **OUTER[outer]}
        _, inner, made, _ = loop(ManagerExchange(manager), model, **options)
        live(model, inner, made, lambda _: note(None), *range(18))
        return manager, made, seen

    for manager, made, seen in lab.run(replica, in_process(2)):
        assert manager.reading == ["stop", "go"] * (len(seen) - 1)
        committed = 0
        for number, ((_, before), (report, after)) in enumerate(pairwise(seen)):
            assert report.committed is (number not in refused)
            assert report.fragment == str(committed % 3), "a refused fragment is tried again"
            changed = [n for n in range(3) if not equal(before[n], after[n])]
            assert changed == ([committed % 3] if report.committed else [])
            committed += report.committed
            assert report.sync == committed
        assert made.committed == manager.current_step() == committed
