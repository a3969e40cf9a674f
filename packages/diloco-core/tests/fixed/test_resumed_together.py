"""Test how those that continue a fixed run meet if some die or were killed."""

import os
import signal

import keys_lab
import pytest
import torch
from simulated import Killed
from strict_lab import STORES, Run
from training_lab import PATIENCE, Clock, identical, push, small_model
from warm_processes import WarmProcess

from diloco_core import DiLoCo, FencedError, StoreExchange, Timing

pytestmark = pytest.mark.sampled


@pytest.fixture
def run(new_store):
    """A run of three ranks that has stopped after three outer steps."""
    run = Run(3, store=new_store())
    run.live(until=3)
    return run


def dies_when_it_has_said(count):
    """Kill the process with the number 2 when it has said so many times that it is there."""
    said = []

    def before(process, kind, key):
        if process.number == 2 and len(said) >= count and keys_lab.kept(key).kind != "claim":
            process.die()
        if process.number == 2 and kind in {"put", "create"} and keys_lab.kept(key).kind in SIGNS:
            said.append(key)

    return before


SIGNS = {"meeting", "claim", "beat"}


def as_undisturbed(held, wanted, caplog):
    """All hold the same; and what is wanted, unless something is known to be lost."""
    assert len(held) == len(wanted)
    assert identical(held)
    assert identical([*held, *wanted]) != ("counts as nothing" in caplog.text)


@pytest.mark.parametrize("first", [0.0, 2.0], ids=["it is there at once", "it comes later"])
@pytest.mark.parametrize(("said", "again"), [(1, 0.5), (1, 8.0), (2, 8.0), (2, 40.0)])
def test_one_of_them_is_killed_and_started_again(run, first, said, again):
    """What the others have said before that is no answer to it."""
    run.before = dies_when_it_has_said(said)
    # Rank 1 comes last, so nobody has met before it is there.
    starts = [(0, 0.0), (1, first + again + 0.2), (2, first), (2, first + again)]
    results = run.simulate([(rank, start, [], True) for rank, start in starts], until=6)
    assert isinstance(results[2], Killed)
    del results[2]
    assert identical([*results, *Run(3).live()])


def test_what_a_dead_process_has_agreed_to_counts_for_nothing_later(run, caplog):
    """Ranks 0 and 1 agree on whom they see.

    Then rank 1 is killed, too, and both it and rank 2 are started again.
    """

    def before(process, _, key):
        if process.number == 2 and keys_lab.kept(key).kind in SIGNS:
            process.die()
        if process.number == 1 and process.clock() > 20.0:
            process.die()

    run.before = before
    starts = [(0, 0.0), (1, 0.0), (2, 0.0), (2, 30.0), (1, 60.0)]
    results = run.simulate([(rank, start, [], True) for rank, start in starts], until=6)
    assert [type(result) for result in results[1:3]] == [Killed, Killed]
    as_undisturbed([results[0], *results[3:]], Run(3).live(), caplog)


@pytest.mark.parametrize("gap", [0.0, 0.2, 1.0])
def test_of_two_processes_of_a_rank_the_later_one_goes_on(gap, caplog):
    run = Run(2)
    run.live(until=3)
    starts = [(0, 0.0), (0, gap), (1, 0.5)]
    results = run.simulate([(rank, start, [], True) for rank, start in starts], until=6)
    fenced = [result for result in results[:2] if isinstance(result, FencedError)]
    assert len(fenced) == 1
    as_undisturbed([held for held in results if isinstance(held, dict)], Run(2).live(), caplog)


def train(store, until, timing=None, resume=False):
    exchange = StoreExchange(store, 0, 1, timing=timing, resume=resume)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1, flush="none") as outer:
        while outer.committed < until:
            push(model, inner, 0, outer.inner_steps)
    return outer.committed


def killed(kind, folder):
    """A process that takes two syncs and is killed inside the block of a third one."""
    exchange = StoreExchange(STORES[kind](folder), 0, 1)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1):
        for step in range(3):
            push(model, inner, 0, step)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "elsewhere"), [("overwriting", False), ("overwriting", True), ("deciding", True)]
)
def test_who_is_waited_for_after_a_kill(tmp_path, caplog, monkeypatch, kind, elsewhere):
    folder = str(tmp_path / "run")
    status, _, _ = WarmProcess(tmp_path / "out", killed, kind, folder).communicate()
    assert status == -signal.SIGKILL
    if elsewhere:  # the same name of a machine, another one: containers may have the same
        monkeypatch.setattr("diloco_core._host.host_id", lambda: "another")
    clock = Clock()
    timing = Timing(lost_after=PATIENCE, clock=clock, sleep=clock.sleep)
    assert train(STORES[kind](folder), 5, timing, resume=True) == 5
    waited = elsewhere and kind == "overwriting"
    assert (clock.now > PATIENCE) is waited
    assert ("their signs of life are watched" in caplog.text) is waited
