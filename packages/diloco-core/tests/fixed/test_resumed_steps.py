"""Test what a rank has of its own when a fixed run is resumed, and what it had loaded before."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from damage_lab import flip
from keys_lab import kept, keys_of, newest, of
from simulated import SimulatedStore
from strict_lab import Run
from training_lab import identical, push, values

from diloco_core import DiLoCo


@dataclass
class Batches(Run):
    """A run whose incarnations train until each rank has taken so many inner steps."""

    def train(self, exchange, until, steps=(11, 11), seen=None, **more):
        net = self.net()
        inner = torch.optim.Adam(net.parameters(), lr=0.1)
        # Something that may have changed since the last save, so that a replica has a reason to
        # save again.
        if self.options.get("save_inner_every") != 0:
            more["stateful"] = {"schedule": torch.optim.lr_scheduler.ConstantLR(inner, 1.0)}
        options = {"sync_every": 4, "fragments": self.fragments, "flush": "none", **self.options}
        with DiLoCo(net, inner, exchange, **options, **more) as outer:
            if seen is not None:
                seen[exchange.rank] = (outer.inner_steps, outer.batches_to_skip)
            while outer.inner_steps < steps[exchange.rank]:
                push(net, inner, exchange.rank, outer.inner_steps)
        return values(net)


@pytest.mark.sampled
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("every", [1, 10])
def test_steps_that_are_dropped_at_the_end_are_taken_up(fragments, every, new_store):
    """The model that is left with holds only what all replicas have synced."""
    wanted = Batches(2, fragments).live()
    for stop in (3, 4, 6, 9):
        run = Batches(2, fragments, options={"save_inner_every": every}, store=new_store())
        left = run.live(steps=(stop, stop))
        seen = {}
        # It is left at once, and nothing is lost by that either.
        assert identical([*left, *run.live(resume=True, steps=(stop, stop), seen=seen)])
        assert seen == {0: (stop, 0), 1: (stop, 0)}
        assert identical([*wanted, *run.live(resume=True)])


def test_a_rank_that_parted_takes_up_its_steps(new_store, caplog):
    """Rank 1 leaves without the sync that rank 0 waits for. Rank 0 then drops its steps."""
    run, seen = Batches(2, store=new_store()), {}
    assert identical(run.live(steps=(8, 7)))
    assert "The last 4 inner steps of this replica are not in the model" in caplog.text
    assert identical(run.live(resume=True, seen=seen))
    assert seen == {0: (8, 0), 1: (7, 0)}


def test_a_save_that_ends_late_does_not_take_the_place_of_a_newer_one():
    """Rank 1 was stopped during its last save, and went on after the next incarnation's end."""
    run, seen = Batches(2), {}
    run.live(steps=(8, 8))
    late = {key: run.store.objects[key] for key in keys_of(run.store.objects, "inner", rank=1)}
    run.live(resume=True, steps=(9, 9))
    for key, data in late.items():
        run.store.write(key, data)
    assert identical(run.live(resume=True, steps=(9, 9), seen=seen))
    assert seen == {0: (9, 0), 1: (9, 0)}


def test_the_newest_save_of_a_sync_counts_and_the_one_before_stays(new_store):
    """Which is what is left where the newest one is damaged."""
    run, seen = Batches(1, options={"save_inner_every": 1}, store=new_store()), {}
    run.live(steps=(8,))
    run.live(resume=True, steps=(9,))
    saved = keys_of(newest(run.store.objects), "inner")
    assert [(kept(key).sync, kept(key).incarnation) for key in saved] == [(1, 1), (2, 2)]
    run.live(resume=True, steps=(9,), seen=seen)
    assert seen == {0: (9, 0)}
    for key in keys_of(newest(run.store.objects), "inner", sync=2):
        run.store.damage(key, flip(run.store.objects[key], 4000))
    run.live(resume=True, steps=(9,), seen=seen)
    assert seen == {0: (8, 4)}, "that of sync 1 is restored, and four batches are missing"


def test_open_steps_that_are_lost_are_counted_in_the_log(new_store, caplog):
    """Killed between two saves, when one fragment had been synced and the other had taken steps."""
    run = Batches(2, 2, options={"save_inner_every": 100}, store=new_store())

    def before(process, kind, key):
        if kind == "put" and of("contribution", sync=4)(key):
            process.die()

    run.before = before
    run.live()
    run.before = None
    seen = {}
    run.live(resume=True, seen=seen, steps=(0, 0))
    (steps, skip), _ = seen.values()
    assert 0 < skip < steps, "saved at the first sync, and not since"
    assert "rank 0: inner steps of this replica that are lost" in caplog.text
    assert "2 of fragment" in caplog.text
    assert "save_inner_every=1 avoids this" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"), [({}, "They are saved"), ({"save_inner_every": 0}, "and they are lost")]
)
def test_what_becomes_of_steps_before_the_first_sync_is_said(new_store, caplog, options, text):
    run = Batches(1, options=options, store=new_store())
    run.live(steps=(3,))
    assert f"the model ends without these steps{'' if options else '.'}" in caplog.text
    assert text in caplog.text
    caplog.clear()
    seen = {}
    run.live(resume=True, steps=(0,), seen=seen)
    assert seen[0][0] == (0 if options else 3)
    assert "before the first sync" not in caplog.text


@dataclass
class Scheduled(Run):
    """A run with a schedule that is stepped after the save in the step of the inner optimizer."""

    saved: bool = True

    def train(self, exchange, until, seen=None):
        net = self.net()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
        stateful = {"schedule": schedule} if self.saved else {}
        options = {"sync_every": 1, "flush": "none", "save_inner_every": 1, "stateful": stateful}
        with DiLoCo(net, inner, exchange, **options) as outer:
            if seen is not None:
                seen.append(schedule.last_epoch)
            while outer.committed < until:
                push(net, inner, exchange.rank, outer.inner_steps)
                schedule.step()
        return values(net)


@pytest.mark.parametrize("saved", [False, True], ids=["alone", "with a schedule"])
def test_the_end_saves_only_what_may_have_changed(monkeypatch, saved):
    """A save is as large as the inner state, so that nobody is to make one for nothing."""
    run, saves, seen, write = Scheduled(1, saved=saved), [], [], SimulatedStore.write

    def counting(store, key, data):
        saves.extend(keys_of([key], "inner"))
        write(store, key, data)

    monkeypatch.setattr(SimulatedStore, "write", counting)
    run.live(until=3)
    assert len(saves) == len(set(saves)) + saved == 3 + saved
    run.live(until=3, resume=True, seen=seen)
    assert seen == [3 if saved else 0]
    assert len(saves) == 3 + saved, "no step was taken"


@dataclass
class Loaded(Run):
    """A run that goes on from a checkpoint, which its first incarnation makes."""

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


@pytest.mark.sampled
@pytest.mark.parametrize(("outer", "fragments", "spare"), CASES)
def test_it_ends_as_one_that_was_not_stopped(outer, fragments, spare, new_store):
    """Stopped before each fragment has had a sync, and later; loaded between syncs or not."""
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
