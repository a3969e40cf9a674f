"""What lives and what differs is refused by name when a strict run is to be continued."""

import copy

import keys_lab
import pytest
import torch
from inner_lab import Loader
from strict_lab import LOST_AFTER, Run, refused
from training_lab import fill, identical

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    FormatError,
    MismatchError,
    ObjectStoreAllReduce,
    RendezvousError,
    RendezvousTimeoutError,
    RunExistsError,
    StoreUnavailableError,
    connect,
    in_process,
)
from diloco_core._loop._membership import FixedMembership
from diloco_core.testing import Killed

SELDOM = {"beat_interval": 600.0, "lost_after": 1200.0}
PATIENT = {rank: {"join_timeout": 10_000.0} for rank in range(2)}


class TestWhatLives:
    """A second life inside a living run is refused."""

    @pytest.fixture
    def dead(self):
        """A run whose two processes were killed after three outer steps, and have not said how they ended."""
        run = Run(2)
        run.silent(0, 1, until=3)
        return run

    def resumed(self, run, alive=None):
        """Resume the run while some processes give signs of life. What both ranks came to."""
        return run.simulate([(rank, 0.0, [], True) for rank in range(2)], alive=alive, until=3)

    def seconds(self, run):
        """Resume the run. When its ranks were done, which they are as soon as they may go on."""
        assert identical(self.resumed(run))
        return max(run.ended.values())

    def attempt(self, run, *ranks):
        """Some ranks begin to resume the run, and are killed as soon as they have claimed their ranks."""

        def before(process, kind, key):
            if keys_lab.of("claim", rank=process.rank)(key) and kind == "create":
                claiming.append(process)
            elif process in claiming:
                process.die()

        run.before, claiming = before, []
        assert all(isinstance(result, Killed) for result in run.live(resume=True, ranks=ranks))
        run.before = None

    @pytest.mark.parametrize("rank", [0, 1])
    def test_whose_beat_changes(self, dead, rank):
        before = dict(dead.store.objects)
        for result in self.resumed(dead, {rank: 5.0}):
            with pytest.raises(
                RunExistsError, match=rf"rank {rank} of the run at .* is alive.*End that process"
            ):
                raise result
        assert dead.store.objects.keys() == before.keys(), "nothing was claimed"

    def test_whose_beat_stands_still_is_dead_after_lost_after(self, dead):
        assert LOST_AFTER < self.seconds(dead) <= 1.3 * LOST_AFTER

    def test_who_beats_less_often_is_watched_for_longer(self):
        """By the claim of its process; the others would call it dead after 100 seconds."""
        run = Run(2, limits={1: SELDOM})
        run.silent(0, 1, until=3)
        again = copy.deepcopy(run)
        run.limits = PATIENT
        assert 1200.0 < self.seconds(run) <= 1300.0
        again.limits = {}
        for result in self.resumed(again, {1: 600.0}):
            with pytest.raises(RunExistsError, match=r"rank 1 of the run at .* is alive"):
                raise result

    @pytest.mark.parametrize(
        "damaged",
        [
            lambda key, data: keys_lab.sealed_again(
                key, data, nonce="another", beat_milliseconds=600_000
            ),
            lambda key, data: keys_lab.sealed_again(key, data, beat_milliseconds=600_000)[:-20],
            lambda key, data: keys_lab.sealed_again(key, data, beat_milliseconds=1000),
        ],
        ids=["of another process", "damaged", "of one that beats more often"],
    )
    def test_what_a_claim_says_counts_only_where_it_makes_the_time_longer(self, dead, damaged):
        key = keys_lab.claim_key(1)
        dead.store.damage(key, damaged(key, dead.store.objects[key]))
        assert LOST_AFTER < self.seconds(dead) <= 1.3 * LOST_AFTER

    def test_an_earlier_attempt_that_beats_less_often_is_watched_for_longer(self, stopped):
        stopped.limits = {0: SELDOM}
        self.attempt(stopped, 0)
        stopped.limits = PATIENT
        assert self.seconds(stopped) > 1200.0

    @pytest.mark.parametrize("alive", [{}, {1: 5.0}])
    def test_who_has_left_a_note_need_not_be_watched(self, stopped, alive):
        assert identical(self.resumed(stopped, alive))
        assert max(stopped.ended.values()) < 0.3 * LOST_AFTER

    def test_the_note_of_another_process_counts_for_nothing(self, stopped):
        key = keys_lab.note_key(1)
        note = keys_lab.sealed_again(key, stopped.store.objects[key], nonce="another")
        stopped.store.damage(key, note)
        for result in self.resumed(stopped, {1: 5.0}):
            with pytest.raises(RunExistsError, match="rank 1"):
                raise result

    def test_another_attempt_to_resume_the_same_rank(self, stopped):
        self.attempt(stopped, 0, 1)
        again = copy.deepcopy(stopped)
        first, _ = self.resumed(stopped, {(0, 2): 25.0})
        with pytest.raises(RunExistsError, match=r"rank 0 of the run at .* is alive"):
            raise first
        first, second = self.resumed(again, {(1, 2): 25.0})
        with pytest.raises(RunExistsError, match=r"rank 1 of the run at .* is alive"):
            raise second
        assert isinstance(first, RendezvousTimeoutError), "other ranks look after themselves"
        assert first.missing == (1,)
        assert again.ended[0] > LOST_AFTER

    def test_time_without_the_store_does_not_count(self, dead):
        """It is away from second 20 to second 220, and all get the whole time again when it is back."""

        def away(process, *_):
            if 20.0 <= process.clock() < 220.0:
                raise StoreUnavailableError("the store is away")

        dead.before = away
        assert self.seconds(dead) > 220.0 + LOST_AFTER

    def test_one_rank_alone_does_not_come_back_while_another_lives(self):
        """Rank 1 was killed; rank 0 waits for it, and has not noticed that yet."""
        run = Run(2)
        _, later = run.overtaken([(1, 45, 400.0)], at=30.0, alive={0: 25.0})
        assert all(isinstance(result, RunExistsError) for result in later)
        assert "rank 0 of the run at simulated://run is alive" in str(later[1])
        assert not [key for key in run.store.objects if keys_lab.kept(key).life == 2]

    def test_without_resume_a_used_prefix_is_refused(self, stopped):
        before = dict(stopped.store.objects)
        assert all(isinstance(result, RunExistsError) for result in stopped.live())
        assert {key: data for key, data in stopped.store.objects.items() if key in before} == before


class TestWhatDiffers:
    def test_world_size(self, stopped):
        stopped.ranks = 3
        refused(
            stopped, MismatchError, "begun with world_size=2, but rank . was given world_size=3"
        )

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"outer_lr": 0.5}, "begun with outer_lr=0.7, but rank . was given outer_lr=0.5"),
            ({"buffers": "rank0"}, "begun with buffers='mean'"),
            ({"fragments": 2}, "begun with fragments=1"),
            ({"outer_optimizer": torch.optim.Adam}, "begun with outer_optimizer=SGD"),
        ],
    )
    def test_settings(self, stopped, options, match):
        refused(stopped, MismatchError, match, **options)

    @pytest.mark.parametrize("what", ["shape", "dtype", "name", "frozen"])
    def test_the_model(self, stopped, what, monkeypatch):
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

    def test_values_that_are_not_synced(self, monkeypatch):
        def masked(mask):
            model = fill(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
            model.register_buffer("mask", torch.full((2,), mask), persistent=False)
            return model

        run = Run(2)
        monkeypatch.setattr(Run, "net", lambda _: masked(1.0))
        run.live(until=3)
        monkeypatch.setattr(Run, "net", lambda _: masked(2.0))
        refused(run, MismatchError, "Tensor 'mask' is .* with values .* in the run")

    def test_sync_every_may_change_if_it_is_the_same_everywhere(self, stopped):
        results = stopped.live(resume=True, sync_every=4)
        assert identical(results)
        key = keys_lab.manifest_key(2)
        assert keys_lab.fields(key, stopped.store.objects[key])["settings"]["sync_every"] == "4"

    def test_sync_every_differs(self, stopped):
        stopped.options = {}
        train = Run.train

        def differently(run, exchange, until, **more):
            return train(run, exchange, until, **{**more, "sync_every": 2 + 2 * exchange.rank})

        stopped.train = differently.__get__(stopped)
        for result in stopped.live(resume=True):
            assert isinstance(result, MismatchError)
            assert "differ in setting 'sync_every'" in str(result)
            assert "Start all replicas with the same settings." in str(result)

    def test_another_inner_optimizer(self, stopped):
        """Only what the user has given is named."""
        stopped.options = {}
        stopped.adam = True
        for result in stopped.live(resume=True, seen={}):
            assert isinstance(result, ConfigurationError)
            assert "other classes than this replica has: optimizer was SGD and is Adam." in str(
                result
            )

    def test_other_things_in_stateful(self, stopped):
        stopped.options = {"stateful": {"loader": Loader()}}
        for result in stopped.live(resume=True):
            assert isinstance(result, ConfigurationError)
            assert (
                "saved with ['optimizer'], but this replica has ['optimizer', 'stateful.loader']"
                in str(result)
            )

    def test_no_run(self):
        refused(Run(2), RendezvousError, "holds no run that could be resumed")

    def test_a_run_that_never_began(self):
        run = Run(2)
        run.live((0, 8, "kill after"), ranks=[0])
        refused(run, RendezvousError, "ended before all of its replicas had met")

    def test_a_run_without_its_manifest(self, stopped):
        for key in (keys_lab.MANIFEST, keys_lab.copy_key(keys_lab.MANIFEST)):
            del stopped.store.objects[key]
        refused(stopped, CorruptedObjectError, "manifest.json and its copy are gone")

    def test_an_elastic_run(self, tmp_path):
        net = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(
            net, inner, connect(tmp_path, rank=0, world_size=1, min_replicas=1), sync_every=1
        ):
            net(torch.ones(1, 2)).sum().backward()
            inner.step()
        exchange = connect(tmp_path, rank=0, world_size=1, resume=True)
        with (
            pytest.raises(RunExistsError, match="holds an elastic run"),
            DiLoCo(net, inner, exchange, sync_every=1),
        ):
            pass

    def test_means(self, tmp_path, lab):
        with ObjectStoreAllReduce(connect(tmp_path, rank=0, world_size=1)) as reduce:
            reduce.mean([torch.ones(3)])
        again = connect(tmp_path, rank=0, world_size=1, resume=True)
        with pytest.raises(RendezvousError, match="without a model"):
            ObjectStoreAllReduce(again).mean([torch.ones(3)])

    def test_a_run_of_another_version(self, stopped):
        key = keys_lab.MANIFEST
        manifest = stopped.store.objects[key]
        version = keys_lab.fields(key, manifest)["version"]
        stopped.store.objects[key] = keys_lab.sealed_again(key, manifest, version=...)
        refused(
            stopped,
            FormatError,
            f"of an earlier version, and this version of diloco-core reads version {version} only",
        )

    def test_a_loaded_state(self, tmp_path):
        net = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = DiLoCo(
            net, inner, connect(tmp_path, rank=0, world_size=1, resume=True), sync_every=1
        )
        with pytest.raises(ConfigurationError, match="cannot be used together with resume="):
            outer.load_state_dict({})
        assert type(in_process(1)[0]) is not type(outer.exchange)
        assert not FixedMembership.resumes
