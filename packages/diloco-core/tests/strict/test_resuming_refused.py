"""What lives and what differs is refused by name when a strict run is to be continued."""

import json

import pytest
import torch
from inner_lab import Loader
from strict_lab import Run, claim, manifest, refused
from training_lab import Clock, fill, identical

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    FormatError,
    MismatchError,
    ObjectStoreAllReduce,
    RendezvousError,
    RunExistsError,
    Timing,
    connect,
    in_process,
)
from diloco_core._exchange._endings import Ending, Progress
from diloco_core._loop._membership import FixedMembership
from diloco_core._store._copies import copy_key
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._records._manifest import MANIFEST
from diloco_core._strict._records._records import beat_key, claim_key, note, note_key
from diloco_core._strict._records._version import VERSION
from diloco_core._strict._resume._ended import check_ended
from diloco_core._wire._sealed import seal, unseal


class TestWhatLives:
    """A second life inside a living run is refused."""

    @pytest.fixture
    def watch(self, tmp_path):
        """Watches two processes, of which those in ``alive`` beat, and returns the seconds that it took."""

        def watched(*alive, notes=(), downtime=lambda now: 0.0, before=2, claims=(), every=1.0):
            clock, store = Clock(), open_store(str(tmp_path / "run"))

            class Away(Patient):
                downtime = property(lambda self: downtime_of(clock.now))

            downtime_of = downtime
            for rank in range(2):
                store.put(beat_key(rank), [b"0"])
            for rank, nonce in notes:
                record = note(Ending(rank, "failed", Progress(3, 3), "x"), nonce)
                store.put(note_key(rank), [record])

            for (rank, life), data in claims:
                store.put(claim_key(rank, life), [data])

            def sleep(seconds):
                clock.sleep(seconds)
                for rank in alive:
                    store.put(beat_key(rank, before - 1), [b"%d" % (clock.now // every)])

            timing = Timing(lost_after=90.0, clock=clock, sleep=sleep)
            check_ended(Away(store, timing), timing, manifest(), 0, before)
            return clock.now

        return watched

    @pytest.mark.parametrize("rank", [0, 1])
    def test_whose_beat_changes(self, watch, rank):
        with pytest.raises(
            RunExistsError, match=rf"rank {rank} of the run at .* is alive.*End that process"
        ):
            watch(rank)

    def test_whose_beat_stands_still_is_dead_after_lost_after(self, watch):
        assert 90.0 < watch() <= 110.0

    def test_who_beats_less_often_is_watched_for_longer(self, watch):
        """By the claim of its process; this one would call it dead after 90 seconds."""
        claims = [((1, 1), claim(1, "nonce 1", beat=600.0).to_bytes())]
        assert 1200.0 < watch(claims=claims) <= 1210.0
        with pytest.raises(RunExistsError, match=r"rank 1 of the run at .* is alive"):
            watch(1, claims=claims, every=600.0)

    @pytest.mark.parametrize(
        "data",
        [
            claim(1, "of another run", beat=600.0).to_bytes(),
            claim(1, "nonce 1", beat=600.0).to_bytes()[:-20],
            claim(1, "nonce 1", beat=1.0).to_bytes(),
        ],
        ids=["of another process", "damaged", "of one that beats more often"],
    )
    def test_what_a_claim_says_counts_only_where_it_makes_the_time_longer(self, watch, data):
        assert 90.0 < watch(claims=[((1, 1), data)]) <= 110.0

    def test_an_earlier_attempt_that_beats_less_often_is_watched_for_longer(self, watch):
        notes = [(0, "nonce 0"), (1, "nonce 1")]
        claims = [((0, 2), claim(0, "attempt", 2, beat=600.0).to_bytes())]
        assert watch(notes=notes, before=3, claims=claims) > 1200.0

    def test_who_has_left_a_note_need_not_be_watched(self, watch):
        assert watch(notes=[(0, "nonce 0"), (1, "nonce 1")]) == 0.0
        assert watch(1, notes=[(0, "nonce 0"), (1, "nonce 1")]) == 0.0

    def test_the_note_of_another_process_counts_for_nothing(self, watch):
        with pytest.raises(RunExistsError, match="rank 1"):
            watch(1, notes=[(0, "nonce 0"), (1, "of another run")])

    def test_another_attempt_to_resume_the_same_rank(self, watch):
        notes = [(0, "nonce 0"), (1, "nonce 1")]
        with pytest.raises(RunExistsError, match=r"rank 0 of the run at .* is alive"):
            watch(0, notes=notes, before=3)
        assert watch(1, notes=notes, before=3) > 90.0, "other ranks look after themselves"

    def test_time_without_the_store_does_not_count(self, watch):
        """It was away from second 20 to second 220."""
        assert watch(downtime=lambda now: min(max(now - 20.0, 0.0), 200.0)) > 305.0, (
            "and all get the whole time again when it is back"
        )

    def test_one_rank_alone_does_not_come_back_while_another_lives(self):
        """Rank 1 was killed; rank 0 waits for it, and has not noticed that yet."""
        run = Run(2)
        _, later = run.overtaken([(1, 45, 400.0)], at=30.0, alive={0: 25.0})
        assert all(isinstance(result, RunExistsError) for result in later)
        assert "rank 0 of the run at simulated://run is alive" in str(later[1])
        assert not [key for key in run.store.objects if ".0002" in key]

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
        assert (
            json.loads(stopped.store.objects["manifests/0002.json"])["settings"]["sync_every"]
            == "4"
        )

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
        for key in (MANIFEST, copy_key(MANIFEST)):
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
        fields = unseal("manifest", MANIFEST, stopped.store.objects[MANIFEST], "x")
        del fields["version"]
        stopped.store.objects[MANIFEST] = seal("manifest", MANIFEST, fields)
        refused(
            stopped,
            FormatError,
            f"of an earlier version, and this version of diloco-core reads version {VERSION} only",
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
