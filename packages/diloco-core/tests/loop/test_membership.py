"""How an outer loop runs is decided once, by the kind of its exchange."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import diloco_core
from diloco_core import DiLoCo, SyncError, in_process
from diloco_core._exchange._resumable import Position
from diloco_core._loop._counters import Counters
from diloco_core._loop._membership import StoreMembership, membership_of
from diloco_core._loop._residuals import Residuals


class SaysThatItReloaded:
    """An exchange of somebody else's, which has a replica alone, and says what it must not."""

    rank, world_size = 0, 1

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, job, *, last=False):
        self.job, self.pending = job, self.inner.begin(job, last=last)
        return self

    def finish(self):
        return replace(self.pending.finish(), reloaded=self.job.kind == "outer")


def test_an_exchange_that_keeps_no_state_cannot_have_reloaded_the_model():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = SaysThatItReloaded(in_process(1)[0])
    model(torch.ones(1, 2)).sum().backward()
    said = "SaysThatItReloaded says that the model was reloaded"
    with pytest.raises(SyncError, match=said), DiLoCo(model, optimizer, exchange, sync_every=1):
        optimizer.step()


class GoesBackWhileCatchingUp:
    """What a replica sees of a run in which others go back to older states after it has restored
    the newest ones.
    """

    rank = 0
    resumes = comes_back = False
    position = Position(sync=4, outer_steps=4, inner_steps=8)

    def restore(self, jobs, *, loaded=False):
        return self.position

    @property
    def counted(self):
        return self.position.inner_steps

    def saved_residuals(self):
        return iter(())


def test_a_run_that_goes_back_while_an_incarnation_begins_counts_fewer_inner_steps():
    exchange, asked_for = GoesBackWhileCatchingUp(), []
    own_state = SimpleNamespace(restore=asked_for.append, restored_steps=0, residuals=Residuals())
    count = Counters([0])

    def catch_up():
        assert count.inner_steps == 8
        exchange.position = Position(sync=5, outer_steps=3, inner_steps=6)

    membership = StoreMembership(exchange, own_state, None)
    membership.begin([], count, restored=False, catch_up=catch_up)
    assert (count.inner_steps, asked_for) == (6, [6])


def test_other_exchanges_have_a_fixed_membership():
    membership = membership_of(in_process(1)[0], [], {}, 10, {}, None, feedback=False)
    assert not isinstance(membership, StoreMembership)
    assert not membership.elastic


def test_nothing_else_in_the_package_asks_of_what_kind_an_exchange_is():
    package = Path(diloco_core.__file__).parent
    asked = [
        path.name
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"isinstance", "issubclass"}
        and "Exchange" in ast.unparse(node.args[1])
    ]
    assert set(asked) == {"_membership.py"}
