"""Test that what lives and what differs is refused by name when a fixed run is to be continued."""

import copy
import json
from functools import partial

import keys_lab
import pytest
import torch
from simulated import Fault, Killed
from strict_lab import LOST_AFTER, Generations, Run, refused
from training_lab import fill, identical

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    FormatError,
    MismatchError,
    ObjectStoreAllReduce,
    RendezvousError,
    ReplicaLostError,
    RunExistsError,
    StoreUnavailableError,
    connect,
    in_process,
)

SELDOM = {"beat_interval": 600.0, "lost_after": 1200.0}
PATIENT = {rank: {"join_timeout": 10_000.0} for rank in range(2)}


@pytest.fixture
def stopped(new_store):
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2, store=new_store())
    run.live(until=3)
    return run


class TestWhatIsAlive:
    """Check that a process inside a living run is refused where a store cannot decide."""

    @pytest.fixture
    def dead(self):
        """Return a run whose two processes were killed without a word after three outer steps."""
        run = Generations(2)
        run.silent(0, 1, until=3)
        return run

    @pytest.fixture
    def left(self):
        run = Generations(2)
        run.live(until=3)
        return run

    def resumed(self, run, alive=None):
        """Resume the run while a rank gives signs of life now and then. What both ranks came to."""
        events = {}
        for rank, seconds in (alive or {}).items():
            key = run.begun()[0] + keys_lab.beat_key(rank)
            beat = run.store.objects[key]
            for count in range(1, 11):
                changed = keys_lab.later_beat(beat, count)
                events[count * seconds] = partial(run.store.write, key, changed)
        return run.simulate([(rank, 0.0, [], True) for rank in range(2)], events=events, until=3)

    def seconds(self, run):
        """Resume the run. When its ranks were done, which they are as soon as they may go on."""
        assert identical(self.resumed(run))
        return max(run.ended.values())

    @pytest.mark.parametrize("rank", [0, 1])
    def test_whose_beat_changes(self, dead, rank):
        before = dict(dead.store.objects)
        for result in self.resumed(dead, {rank: 5.0}):
            with pytest.raises(
                RunExistsError, match=rf"rank {rank} of the run at .* is alive.*End that process"
            ):
                raise result
        assert dead.store.objects.keys() == before.keys(), "nothing was begun"

    def test_whose_beat_stands_still_is_dead_after_lost_after(self, dead):
        assert LOST_AFTER < self.seconds(dead) <= 1.3 * LOST_AFTER

    def test_whose_beat_cannot_be_read_is_watched_as_long(self, dead):
        dead.store.damage(dead.begun()[0] + keys_lab.beat_key(1), b"\xff 1.2.3 \xff")
        assert LOST_AFTER < self.seconds(dead) <= 1.3 * LOST_AFTER

    def test_who_beats_less_often_is_watched_for_longer(self):
        """By its beats; the others would call it dead after 100 seconds.

        But no longer than for a sync.
        """
        run = Generations(2, limits={1: SELDOM})
        run.silent(0, 1, until=3)
        again = copy.deepcopy(run)
        run.limits = PATIENT
        assert 1000.0 < self.seconds(run) <= 1100.0
        again.limits = {}
        for result in self.resumed(again, {1: 600.0}):
            with pytest.raises(RunExistsError, match=r"rank 1 of the run at .* is alive"):
                raise result

    def test_who_has_left_a_note_need_not_be_watched(self, left):
        assert self.seconds(left) < 0.3 * LOST_AFTER

    def test_time_without_the_store_does_not_count(self, dead):
        """It is away from second 20 to 220, and all get the whole time again when it is back."""

        def away(process, *_):
            if 20.0 <= process.clock() < 220.0:
                raise StoreUnavailableError("the store is away")

        dead.before = away
        assert self.seconds(dead) > 220.0 + LOST_AFTER

    def test_one_rank_alone_does_not_come_back(self):
        """Rank 1 was killed; rank 0 waits for it, and has not noticed that yet."""
        run = Generations(2)
        processes = [(0, 0.0, [], False), (1, 0.0, [Fault(1, 1, 40, "kill after")], False)]
        lost, killed, again = run.simulate([*processes, (1, 30.0, [], True)], until=6)
        assert isinstance(killed, Killed)
        assert isinstance(lost, ReplicaLostError)
        with pytest.raises(RunExistsError, match=r"rank 0 of the run at .* is alive"):
            raise again
        assert len(run.begun()) == 1


def test_another_world_size_is_refused(stopped):
    stopped.ranks = 3
    refused(stopped, MismatchError, "begun with world_size=2, but rank . was given world_size=3")


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["shape", "dtype", "name", "frozen"])
def test_another_model_is_refused(stopped, what, monkeypatch):
    def net(_):
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.Linear(5, 3 if what == "shape" else 2)
        )
        if what == "dtype":
            model = model.to(torch.bfloat16)
        if what == "name":
            model = torch.nn.Sequential(*model[:1], torch.nn.Identity(), model[1])
        if what == "frozen":
            model[0].requires_grad_(False)
        return model

    monkeypatch.setattr(Run, "net", net)
    refused(stopped, MismatchError, "begun with another model than the one that rank . has")


def test_other_values_that_are_not_synced_are_refused(monkeypatch, new_store):
    def masked(mask):
        model = fill(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
        model.register_buffer("mask", torch.full((2,), mask), persistent=False)
        return model

    run = Run(2, store=new_store())
    monkeypatch.setattr(Run, "net", lambda _: masked(1.0))
    run.live(until=3)
    monkeypatch.setattr(Run, "net", lambda _: masked(2.0))
    refused(run, MismatchError, "Tensor 'mask' is .* with values .* in the run")


def test_a_run_that_never_began_is_refused(new_store):
    run = Run(2, store=new_store())
    run.live((0, 5, "kill after"), ranks=[0])
    refused(run, RendezvousError, "holds no run to resume")


def test_an_elastic_run_is_refused(tmp_path):
    net = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with DiLoCo(net, inner, connect(tmp_path, rank=0, world_size=1, min_replicas=1), sync_every=1):
        net(torch.ones(1, 2)).sum().backward()
        inner.step()
    exchange = connect(tmp_path, rank=0, world_size=1, resume=True)
    with (
        pytest.raises(RunExistsError, match="holds a run with elastic membership"),
        DiLoCo(net, inner, exchange, sync_every=1),
    ):
        pass


def test_a_run_of_another_version_is_refused(stopped):
    for key in keys_lab.keys_of(stopped.store.objects, "manifest"):
        manifest = json.loads(stopped.store.objects[key])
        manifest["format"] -= 1
        stopped.store.objects[key] = json.dumps(manifest).encode()
    refused(stopped, FormatError, "manifest.json")


def test_a_loaded_state_is_refused(tmp_path):
    net = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = DiLoCo(net, inner, connect(tmp_path, rank=0, world_size=1, resume=True), sync_every=1)
    with pytest.raises(ConfigurationError, match="cannot be used together with resume="):
        outer.load_state_dict({})
    assert type(in_process(1)[0]) is not type(outer.exchange)


@pytest.mark.parametrize("option", [{"resume": True}, {"return_within": 60}])
def test_of_means_nothing_comes_back(tmp_path, option):
    exchange = connect(tmp_path / "run", rank=0, world_size=1, **option)
    with pytest.raises(ConfigurationError, match=f"{min(option)}= cannot be used for means"):
        ObjectStoreAllReduce(exchange).mean([torch.ones(1)])


def test_means_do_not_wait_for_what_cannot_come_back(tmp_path):
    exchange = connect(tmp_path / "run", rank=0, world_size=1, return_within=0)
    with ObjectStoreAllReduce(exchange) as reduce:
        reduce.mean([torch.ones(1)])


def test_no_folder_is_left_behind(lab, tmp_path):
    place = tmp_path / "runs" / "other"
    exchange = connect(str(place), rank=0, world_size=1, resume=True)
    outer, _ = lab.outer_loop(lab.small_model(), exchange)
    with pytest.raises(RendezvousError, match="holds no run to resume") as refusal, outer:
        pass
    assert refusal.value.final, "another attempt would be refused, too"
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    exchange = connect(str(place), rank=0, world_size=1, resume=True)
    exchange.leave()
    assert not list((tmp_path / "runs").iterdir())
