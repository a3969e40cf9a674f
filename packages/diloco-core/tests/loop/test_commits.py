"""A commit that is refused changes nothing but the model, which goes back to the global copy."""

import copy

import pytest
import torch
from torch import nn

from diloco_core import DiLoCo, ManagerExchange, MockManager, in_process


class Refusing(MockManager):
    """A torchft-shaped manager that refuses some commits at all replicas, by number of attempt."""

    def __init__(self, exchange, refused):
        super().__init__(exchange)
        self.attempts, self.refused, self.reading = 0, refused, []

    def should_commit(self):
        self.attempts += 1
        return self.attempts - 1 not in self.refused and super().should_commit()

    def disallow_state_dict_read(self):
        super().disallow_state_dict_read()
        self.reading.append("stop")

    def allow_state_dict_read(self):
        super().allow_state_dict_read()
        self.reading.append("go")


OUTER = {
    "Nesterov": {},
    "Adam": {"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)},
}


class Run:
    """One replica under a refusing manager: what it held just before and just after every sync."""

    def __init__(self, lab, exchange, refused, steps, *, skip=(), **options):
        self.model = lab.fill(nn.ModuleList(nn.Linear(3, 4) for _ in range(3)))
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.manager = Refusing(exchange, refused)
        self.syncs = []
        # This hook comes before the outer loop's own, so it sees what the inner steps made.
        inner.register_step_post_hook(lambda *_: setattr(self, "before", self.held()))
        exchange = ManagerExchange(self.manager)
        self.outer = DiLoCo(self.model, inner, exchange, on_sync=self.synced, **options)
        with self.outer:
            for step in range(steps):
                if step not in skip:
                    lab.push(self.model, inner, exchange.rank, step)

    def synced(self, report):
        after = self.held()
        self.syncs.append((report, self.before, after))
        self.before = after  # a flush syncs again with no inner step in between

    def held(self):
        local = [
            torch.cat([p.detach().flatten() for p in part.parameters()]) for part in self.model
        ]
        return local, copy.deepcopy(self.outer.state_dict()["fragments"])


def equal(a, b):
    """Whether two states are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("outer", sorted(OUTER))
@pytest.mark.parametrize("refused", [{0}, {4}, {3, 4, 7}])
def test_nothing_is_changed_but_the_model(lab, outer, refused):
    def replica(exchange):
        return Run(lab, exchange, refused, 18, sync_every=6, fragments=3, **OUTER[outer])

    for run in lab.run(replica, in_process(2)):
        assert run.manager.reading == ["stop", "go"] * run.manager.attempts
        assert [report.committed for report, *_ in run.syncs] == [
            number not in refused for number in range(len(run.syncs))
        ]
        committed = 0
        for report, (model_before, state_before), (model_after, state_after) in run.syncs:
            turn = committed % 3
            assert report.fragment == str(turn), "a refused fragment is tried again"
            committed += report.committed
            assert report.sync == committed
            others = [number for number in range(3) if number != turn]
            assert all(torch.equal(model_after[n], model_before[n]) for n in others), (
                "the others keep their progress"
            )
            assert torch.equal(model_after[turn], state_after[turn]["copy"][0])
            assert not torch.equal(model_after[turn], model_before[turn])
            if report.committed:
                assert equal([state_after[n] for n in others], [state_before[n] for n in others])
                assert not equal(state_after[turn]["copy"], state_before[turn]["copy"])
                assert not equal(state_after[turn]["outer"], state_before[turn]["outer"])
            else:
                assert equal(state_after, state_before), (
                    "global copies and outer states, to the bit"
                )
        assert run.outer.committed == run.manager.current_step() == committed
