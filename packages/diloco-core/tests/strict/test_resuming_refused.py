"""What differs, what lives and what is damaged is refused by name when a strict run is to be continued."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from damage_lab import flip
from safetensors.torch import load_file
from strict_lab import Run
from training_lab import Clock, fill, identical

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    FormatError,
    MismatchError,
    ObjectStoreAllReduce,
    RendezvousError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    Timing,
    connect,
    export,
    in_process,
)
from diloco_core._exchange._base import Schema
from diloco_core._exchange._endings import Ending, Progress
from diloco_core._loop._membership import FixedMembership
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._liveness import Liveness
from diloco_core._strict._manifest import MANIFEST, Manifest, cut
from diloco_core._strict._records import beat_key, claim_key, note, note_key
from diloco_core._strict._resume._choice import keys_of, states
from diloco_core._strict._resume._ended import check_ended
from diloco_core._strict._resume._meeting import Meeting, claim_again, meeting_key
from diloco_core._wire._sealed import seal, unseal
from diloco_core.testing._store import SimulatedStore


@pytest.fixture
def stopped():
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2)
    run.live(until=3)
    return run


def refused(run, error, match, **options):
    """All ranks refuse, and nothing is written."""
    before = dict(run.store.objects)
    for result in run.live(resume=True, **options):
        with pytest.raises(error, match=match):
            raise result
    assert run.store.objects == before


def manifest(earlier=(), ranks=2, fragments=1):
    tables = [{"shards": ranks} for _ in range(fragments)]
    members = [(1, f"nonce {rank}") for rank in range(ranks)]
    settings = {"committed": "0"}
    return Manifest("", 32 * "c", ranks, settings, {}, tables, {}, members, list(earlier))


class TestWhatLives:
    """A second life inside a living run is refused."""

    @pytest.fixture
    def watch(self, tmp_path):
        """Watches two processes, of which those in ``alive`` beat all the time, and returns the seconds that it took."""

        def watched(*alive, notes=(), downtime=lambda now: 0.0, before=2):
            clock, store = Clock(), open_store(str(tmp_path / "run"))

            class Away(Patient):
                downtime = property(lambda self: downtime_of(clock.now))

            downtime_of = downtime
            for rank in range(2):
                store.put(beat_key(rank), [b"0"])
            for rank, nonce in notes:
                record = note(Ending(rank, "failed", Progress(3, 3), "x"), nonce)
                store.put(note_key(rank), [record])

            def sleep(seconds):
                clock.sleep(seconds)
                for rank in alive:
                    store.put(beat_key(rank, before - 1), [str(clock.now).encode()])

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
            ({"buffers": "rank0"}, "begun with buffers=mean"),
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

    def test_no_run(self):
        refused(Run(2), RendezvousError, "holds no run that could be resumed")

    def test_a_run_that_never_began(self):
        run = Run(2)
        run.live((0, 6, "kill after"), ranks=[0])
        refused(run, RendezvousError, "ended before all of its replicas had met")

    def test_a_run_without_its_manifest(self, stopped):
        del stopped.store.objects[MANIFEST]
        refused(stopped, CorruptedObjectError, "manifest.json is gone")

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
            stopped, FormatError, "of version 1, and this version of diloco-core reads version 2"
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


class TestWhatIsDamaged:
    def newest(self, run, fragment="state/"):
        return max(key for key in run.store.objects if key.startswith(fragment))

    def harm(self, run, key, place=0.5):
        data = run.store.objects[key]
        run.store.objects[key] = flip(data, int(8 * len(data) * place))

    @pytest.mark.parametrize("place", [0.02, 0.5, 0.9, 0.9999])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_state_is_named_and_the_one_before_is_taken_if_that_is_asked_for(
        self, stopped, caplog, place, rank
    ):
        sync = self.newest(stopped).split("/")[1]
        (key,) = (
            key for key in stopped.store.objects if key.startswith(f"state/{sync}/{rank:05}.")
        )
        before, seen = stopped.store.below("state/"), {}
        self.harm(stopped, key, place)
        results = stopped.live(resume=True)
        named = next(result for result in results if isinstance(result, CorruptedObjectError))
        assert key in str(named)
        assert 'resume="newest-whole"' in str(named)
        assert stopped.store.below("state/") == before
        with caplog.at_level(logging.WARNING):
            results = stopped.live(resume="newest-whole", seen=seen)
        assert identical(results)
        assert seen == dict.fromkeys(range(2), (2, 4, 0))
        assert "continues from outer step 2, since no newer state is whole" in caplog.text

    def test_nothing_older_is_left(self, stopped):
        for key in stopped.store.below("state/"):
            self.harm(stopped, key, 0.9)
        result, _ = stopped.live(resume="newest-whole")
        with pytest.raises(CorruptedObjectError, match="holds no whole state any more"):
            raise result

    def test_a_part_of_a_finished_sync_is_gone(self, stopped):
        stopped.store.remove(self.newest(stopped))
        result, _ = stopped.live(resume=True)
        with pytest.raises(
            CorruptedObjectError,
            match=r"the state after outer step 3 in .* is incomplete: state/00000003/.* missing.*newest-whole",
        ):
            raise result

    @pytest.mark.parametrize("place", [0.02, 0.5, 0.999])
    def test_inner_state(self, stopped, caplog, place):
        """The one before is taken, and the batches that it lacks are said."""
        keys = sorted(stopped.store.below("inner/00001/"))
        assert len(keys) == 2
        self.harm(stopped, keys[-1], place)
        seen = {}
        with caplog.at_level(logging.WARNING):
            assert identical(stopped.live(resume=True, seen=seen))
        assert seen == {0: (3, 6, 0), 1: (3, 6, 2)}
        assert "restored the inner state that was saved after sync 2 instead. Skip 2 batches" in (
            caplog.text
        )

    def test_inner_state_of_another_rank_or_sync(self, stopped, caplog):
        """Its bytes are whole, but they belong under another key."""
        objects = stopped.store.objects
        newest, theirs = self.newest(stopped, "inner/00001/"), self.newest(stopped, "inner/00000/")
        objects[newest] = objects[theirs]
        assert identical(stopped.live(resume=True))
        assert "written under another key" in caplog.text

    def test_inner_state_that_a_late_process_has_saved_is_not_looked_at(self, stopped, caplog):
        late = f"inner/00001/00000005.{16 * 'f'}.safetensors"
        stopped.store.write(late, b"of a sync that does not count")
        assert identical(stopped.live(resume=True))
        assert late not in caplog.text
        assert late in stopped.store.objects, "it may be that of a later life"

    @pytest.mark.parametrize("lives", [1, 2])
    @pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
    def test_the_newest_manifest(self, stopped, lives, place):
        if lives == 2:
            stopped.live(resume=True)
        key = {1: MANIFEST, 2: "manifests/0002.json"}[lives]
        self.harm(stopped, key, place)
        refused(stopped, CorruptedObjectError, key)

    @pytest.mark.parametrize(
        ("record", "error", "match"),
        [
            (
                "claims/00001.0002.json",
                RendezvousTimeoutError,
                "missing: rank 1.*claims/00001.0002",
            ),
            # Rank 1 has met, and waits for rank 0, which cannot read that.
            ("meetings/00001.0002.json", ReplicaLostError, "rank 1 has counted this replica"),
        ],
    )
    def test_what_replicas_meet_by(self, stopped, record, error, match, monkeypatch):
        write = SimulatedStore.write

        def damaged(store, key, data):
            write(store, key, flip(data, 4 * len(data)) if key == record else data)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedStore, "write", damaged)
            result, _ = stopped.live(resume=True)
        with pytest.raises(error, match=match):
            raise result
        assert identical(stopped.live(resume=True)), "what a dead process has left does no harm"

    @pytest.mark.parametrize("record", ["claims/00001.0002.json", "meetings/00001.0002.json"])
    def test_what_replicas_meet_by_is_written_again(self, stopped, record):
        """It rots between the first look at it and the next one."""
        rot = lambda: record in stopped.store.objects and self.harm(stopped, record)
        assert identical(stopped.live(resume=True, starts=[1.0, 0.0], events={0.9: rot}))

    def test_a_deleted_manifest_of_a_later_life(self, stopped, caplog):
        stopped.live(resume=True, until=4)
        stopped.store.remove("manifests/0002.json")
        before = stopped.store.below("state/")
        result, _ = stopped.live(resume=True)
        with pytest.raises(
            CorruptedObjectError,
            match=r"holds commits/00000004.* no manifest says so: an object under manifests/",
        ):
            raise result
        assert stopped.store.below("state/") == before
        seen = {}
        with caplog.at_level(logging.ERROR):
            assert identical(stopped.live(resume="newest-whole", seen=seen))
        assert seen == dict.fromkeys(range(2), (3, 6, 0))
        assert "no manifest says so" in caplog.text
        assert identical(stopped.live(resume=True)), "what was given up is known from then on"

    @pytest.mark.parametrize("until", [3, 4])
    def test_a_damaged_manifest_of_a_later_life(self, stopped, until):
        stopped.live(resume=True, until=until)
        self.harm(stopped, "manifests/0002.json")
        refused(stopped, CorruptedObjectError, r"manifests/0002\.json.*newest-whole")
        seen = {}
        assert identical(stopped.live(resume="newest-whole", seen=seen))
        assert seen == dict.fromkeys(range(2), (3, 6, 0))

    def test_objects_of_another_run_alone_say_nothing(self, stopped):
        stopped.store.write(f"state/00000009/00000.{16 * 'f'}.safetensors", b"of an emptied prefix")
        assert identical(stopped.live(resume=True))


def late_bit(data):
    """A flipped bit among the last values of a shard."""
    return flip(data, 8 * (len(data) - 60))


def test_they_have_met_only_when_all_say_the_same(tmp_path):
    """Rank 2 is started once more in the middle; what rank 1 said before that is no answer to it."""
    clock, folder = Clock(), open_store(str(tmp_path / "run"))
    schema = Schema({}, {})

    def arrive(rank, life, nonce):
        return claim_again(store, rank, life, 3, "", nonce, schema, 64, timing)

    def say(rank, life, *nonces):
        key = meeting_key(rank, life)
        folder.put(key, [seal("meeting", key, {"rank": rank, "nonces": list(nonces)})])

    later = {
        2.0: lambda: arrive(2, 2, "two"),
        4.0: lambda: arrive(2, 3, "three"),
        6.0: lambda: say(2, 3, "mine", "one", "three"),
        8.0: lambda: say(1, 2, "mine", "one", "three"),
    }

    def sleep(seconds):
        clock.sleep(seconds)
        for due in [due for due in later if due <= clock.now]:
            later.pop(due)()

    timing = Timing(clock=clock, sleep=sleep)
    store = Patient(folder, timing)
    liveness = Liveness(store, 0, 3, timing, "mine")
    liveness.life = 2
    own_claim = arrive(0, 2, "mine")
    arrive(1, 2, "one")
    say(1, 2, "mine", "one", "two")
    claims = Meeting(store, own_claim, manifest(ranks=3), timing, liveness).meet(schema)
    assert clock.now >= 8.0
    assert [claim.nonce for claim in claims] == ["mine", "one", "three"]


def test_another_process_of_the_same_rank_is_noticed_while_it_meets(tmp_path):
    """On a store that does not create exclusively, the later one has overwritten the claim."""
    clock, folder = Clock(), open_store(str(tmp_path / "run"))
    timing = Timing(clock=clock, sleep=clock.sleep)
    store, schema = Patient(folder, timing), Schema({}, {})
    own_claim = claim_again(store, 0, 2, 2, "", "mine", schema, 64, timing)
    folder.put(claim_key(0, 2), [replace(own_claim, nonce="theirs").to_bytes()])
    meeting = Meeting(store, own_claim, manifest(), timing, Liveness(store, 0, 2, timing, "mine"))
    with pytest.raises(RunExistsError, match=r"rank 0 of .* is taken by"):
        meeting.meet(schema)
    assert clock.now < 60.0
    with pytest.raises(RunExistsError, match=r"another process resumes rank 0 .* at this moment"):
        claim_again(store, 0, 2, 2, "", "mine", schema, 64, timing)


def rebuilt(run, damaged):
    """The same run in another store, with one damaged object."""
    other = Run(run.ranks, run.fragments, run.adam, run.syncs)
    for key, data in run.store.objects.items():
        other.store.write(key, late_bit(data) if key == damaged else data)
    return other


class TestTheChoice:
    """Which syncs of which life count, and which state is the newest."""

    def test_lives_are_cut_where_a_later_one_goes_on(self):
        base = manifest([(32 * "a", 3), (32 * "b", 5)])
        assert cut(base, 9) == [(32 * "a", 3), (32 * "b", 5), (32 * "c", 9)]
        assert cut(base, 5) == [(32 * "a", 3), (32 * "b", 5), (32 * "c", 5)]
        assert cut(base, 4) == [(32 * "a", 3), (32 * "b", 4), (32 * "c", 4)]
        assert cut(base, 2) == [(32 * "a", 2), (32 * "b", 2), (32 * "c", 2)]
        again = manifest(cut(base, 4))
        assert [again.run_of(sync)[0] for sync in (3, 4, 5)] == list("abc")
        assert [base.run_of(sync)[0] for sync in (0, 3, 4, 5, 6)] == list("aabbc")

    def test_objects_of_other_lives_do_not_count(self):
        base = manifest([(32 * "a", 3)])
        ours = keys_of(base, 0, 3) + keys_of(base, 0, 4)
        late = [key.replace(16 * "c", 16 * "a") for key in keys_of(base, 0, 5)]
        found = states(base, [*ours, *late], [], [])
        assert (found.whole, found.least) == ([4, 3], 3)

    def test_a_sync_shows_that_the_one_before_was_whole(self):
        base = manifest()
        commits = [f"commits/00000007.{16 * 'c'}.json", f"commits/00000009.{16 * 'd'}.json"]
        assert states(base, keys_of(base, 0, 2), commits, [5]) == states(
            base, keys_of(base, 0, 2), commits, []
        )
        found = states(base, keys_of(base, 0, 2), commits, [9])
        assert (found.whole, found.least) == ([2], 8)

    @pytest.mark.parametrize(("committed", "last"), [(0, [6, 5]), (1, [5, 6])])
    def test_turns_go_on_from_the_steps_before_the_run(self, committed, last):
        base = manifest(fragments=2)
        base.settings["committed"] = str(committed)
        assert base.last_syncs(6) == last
        assert base.last_syncs(1) == [0, 1]


def test_what_is_exported_is_what_is_resumed(tmp_path, caplog):
    run = Run(2)
    run.live(until=3)
    run.live(resume=True, until=5)
    (weights, *_) = run.live(resume=True)
    folder = tmp_path / "run"
    for key, data in run.store.objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    assert export(folder, tmp_path / "model") == 6
    assert identical([load_file(tmp_path / "model"), weights])
    newest = max(key for key in run.store.objects if key.startswith("state/"))
    (folder / newest).write_bytes(late_bit(run.store.objects[newest]))
    assert export(folder, tmp_path / "model") == 5
    (weights, *_) = rebuilt(run, newest).live(resume="newest-whole", until=5)
    assert identical([load_file(tmp_path / "model"), weights])
    (folder / "manifests/0003.json").write_text("torn")
    with pytest.raises(CorruptedObjectError, match=r"manifests/0003\.json"):
        export(folder, tmp_path / "model")
