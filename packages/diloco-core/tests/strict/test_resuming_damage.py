"""What is damaged or gone when a strict run is to be continued: it is named, mended or passed over."""

import logging

import keys_lab
import pytest
from damage_lab import flip
from keys_lab import copy_key
from strict_lab import Run, refused
from training_lab import identical

from diloco_core import (
    CorruptedObjectError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
)
from diloco_core.testing import SimulatedStore

INCOMPLETE = (
    r"the state after outer step 3 in .* is incomplete: state/00000003/.* missing.*newest-whole"
)
SECOND = keys_lab.manifest_key(2)
CLAIM, MEETING = keys_lab.claim_key(1, 2), keys_lab.meeting_key(1, 2)


class TestWhatIsDamaged:
    def newest(self, run, kind="state", **wanted):
        return keys_lab.keys_of(run.store.objects, kind, **wanted)[-1]

    def kept(self, run, *kinds):
        """The objects of some kinds."""
        objects = run.store.objects.items()
        return {key: data for key, data in objects if keys_lab.kept(key).kind in kinds}

    def harm(self, run, key, place=0.5):
        for harmed in {key, copy_key(key)} & set(run.store.objects):
            data = run.store.objects[harmed]
            run.store.objects[harmed] = flip(data, int(8 * len(data) * place))

    def remove(self, run, key):
        for lost in {key, copy_key(key)} & set(run.store.objects):
            run.store.remove(lost)

    @pytest.mark.parametrize("place", [0.02, 0.5, 0.9, 0.9999])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_state_is_named_and_the_one_before_is_taken_if_that_is_asked_for(
        self, stopped, caplog, place, rank
    ):
        key = self.newest(stopped, rank=rank)
        self.harm(stopped, key, place)
        before, seen = self.kept(stopped, "state"), {}
        results = stopped.live(resume=True)
        named = next(result for result in results if isinstance(result, CorruptedObjectError))
        assert key in str(named)
        assert 'resume="newest-whole"' in str(named)
        assert self.kept(stopped, "state") == before
        with caplog.at_level(logging.WARNING):
            results = stopped.live(resume="newest-whole", seen=seen)
        assert identical(results)
        assert seen == dict.fromkeys(range(2), (2, 4, 0))
        assert "continues from outer step 2, since no newer state is whole" in caplog.text
        assert "has deleted it" not in caplog.text

    def test_inner_state_of_a_sync_that_was_given_up_is_named(self, stopped, caplog):
        """The only save is that of the last sync, whose state is damaged."""
        for key in self.kept(stopped, "inner"):
            if keys_lab.kept(key).sync != 3:
                stopped.store.remove(key)
        self.harm(stopped, self.newest(stopped))
        saved = [self.newest(stopped, "inner", rank=rank) for rank in range(2)]
        seen = {}
        with caplog.at_level(logging.WARNING):
            assert identical(
                stopped.live(resume="newest-whole", seen=seen, until=3, save_inner_every=10)
            )
        assert seen == dict.fromkeys(range(2), (2, 4, 4))
        for key in saved:
            assert f"the inner state in simulated://run/{key}" in caplog.text
        assert "was saved after sync 3, which the run has since given up" in caplog.text
        assert "holds no inner state" not in caplog.text
        caplog.clear()
        assert identical(stopped.live(resume=True))
        assert "given up" not in caplog.text, "it was deleted when the next one was saved"

    def test_nothing_older_is_left(self, stopped):
        for key in self.kept(stopped, "state"):
            self.harm(stopped, key, 0.9)
        result, _ = stopped.live(resume="newest-whole")
        with pytest.raises(CorruptedObjectError, match="holds no whole state any more"):
            raise result

    def test_a_part_of_a_finished_sync_is_gone(self, stopped):
        stopped.store.remove(self.newest(stopped))
        result, _ = stopped.live(resume=True)
        with pytest.raises(CorruptedObjectError, match=INCOMPLETE):
            raise result

    @pytest.mark.parametrize("evidence", ["contribution", "inner"])
    def test_a_part_of_the_last_sync_of_a_killed_run_is_gone(self, stopped, caplog, evidence):
        """No record of a later sync shows that the state was whole, but what somebody wrote after that sync does."""
        self.killed(stopped, evidence)
        lost = self.newest(stopped)
        stopped.store.remove(lost)
        result, _ = stopped.live(resume=True)
        with pytest.raises(CorruptedObjectError, match=INCOMPLETE):
            raise result
        seen = {}
        with caplog.at_level(logging.ERROR):
            assert identical(stopped.live(resume="newest-whole", seen=seen))
        assert seen[0][:2] == seen[1][:2] == (2, 4)
        assert f"is incomplete: {lost} missing" in caplog.text
        assert "continues from outer step 2, since no newer state is whole" in caplog.text

    @pytest.mark.parametrize("resume", [True, "newest-whole"])
    def test_a_part_of_the_initial_state_of_a_killed_run_is_gone(self, resume):
        run = Run(2)
        run.live(until=-1)  # which it has reached when it begins
        self.killed(run, "contribution")
        self.remove(run, self.newest(run, copy=False))
        result, _ = run.live(resume=resume)
        with pytest.raises(
            CorruptedObjectError,
            match=r"no whole state any more: state/00000000/.* missing, although later objects show that it was there",
        ):
            raise result

    def killed(self, run, evidence):
        """Leave the store as a killed run does, with nothing but contributions or inner state that shows its last sync."""
        for key in self.kept(run, *{"note", "inner", "contribution"} - {evidence}):
            run.store.remove(key)
        if evidence == "contribution":
            newest = keys_lab.kept(self.newest(run))
            delta = keys_lab.contribution_key(newest.run, newest.sync + 1, 1)
            run.store.write(delta, b"of a sync that was never committed")

    @pytest.mark.parametrize("place", [0.02, 0.5, 0.999])
    def test_inner_state(self, stopped, caplog, place):
        """The one before is taken, and the batches that it lacks are said."""
        keys = keys_lab.keys_of(stopped.store.objects, "inner", rank=1)
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
        newest, theirs = (self.newest(stopped, "inner", rank=rank) for rank in (1, 0))
        objects[newest] = objects[theirs]
        assert identical(stopped.live(resume=True))
        assert "written under another key" in caplog.text

    def test_inner_state_that_a_late_process_has_saved_is_not_looked_at(self, stopped, caplog):
        late = keys_lab.inner_key(16 * "f", 5, 1, 1)
        stopped.store.write(late, b"of a sync that does not count")
        assert identical(stopped.live(resume=True))
        assert late not in caplog.text
        assert late in stopped.store.objects, "it may be that of a later life"

    @pytest.mark.parametrize("lives", [1, 2])
    @pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
    def test_the_newest_manifest(self, stopped, lives, place):
        if lives == 2:
            stopped.live(resume=True)
        key = keys_lab.manifest_key(lives)
        self.harm(stopped, key, place)
        refused(stopped, CorruptedObjectError, key)

    @pytest.mark.parametrize(
        ("record", "error", "match"),
        [
            (CLAIM, RendezvousTimeoutError, f"missing: rank 1.*{CLAIM}"),
            # Rank 1 has met, and waits for rank 0, which cannot read that.
            (MEETING, ReplicaLostError, "rank 1 has counted this replica"),
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

    @pytest.mark.parametrize("record", [CLAIM, MEETING])
    def test_what_replicas_meet_by_is_written_again(self, stopped, record):
        """It rots between the first look at it and the next one."""

        def rot():
            if record in stopped.store.objects:
                self.harm(stopped, record)

        assert identical(stopped.live(resume=True, starts=[1.0, 0.0], events={0.9: rot}))

    def test_what_is_damaged_after_its_writer_has_met_is_written_again(self, stopped, monkeypatch):
        """Rank 1 has met, and waits for the choice of rank 0, which cannot read what rank 1 has said."""
        write, harmed = SimulatedStore.write, []

        def damaged_once(store, written, data):
            met = written == MEETING and "" not in keys_lab.fields(MEETING, data)["nonces"]
            if met and not harmed:
                harmed.append(data)
                data = flip(data, 4 * len(data))
            write(store, written, data)

        monkeypatch.setattr(SimulatedStore, "write", damaged_once)
        assert identical(stopped.live(resume=True))
        assert harmed

    def test_a_manifest_of_other_processes_is_not_obeyed(self, stopped, monkeypatch):
        """On a store that lets objects be overwritten, another rank 0 may have written it."""
        write = SimulatedStore.write

        def of_another(store, written, data):
            if written == SECOND:
                data = keys_lab.sealed_again(SECOND, data, run=32 * "f")
            write(store, written, data)

        monkeypatch.setattr(SimulatedStore, "write", of_another)
        _, result = stopped.live(resume=True)
        with pytest.raises(RunExistsError, match="was written by another process of rank 0"):
            raise result

    def test_a_deleted_manifest_of_a_later_life(self, stopped, caplog):
        stopped.live(resume=True, until=4)
        self.remove(stopped, SECOND)
        before, commit = self.kept(stopped, "state"), self.newest(stopped, "commit")
        result, _ = stopped.live(resume=True)
        with pytest.raises(
            CorruptedObjectError,
            match=rf"holds {commit}, .* no manifest says so: an object under manifests/",
        ):
            raise result
        assert self.kept(stopped, "state") == before
        seen = {}
        with caplog.at_level(logging.ERROR):
            assert identical(stopped.live(resume="newest-whole", seen=seen))
        assert seen == dict.fromkeys(range(2), (3, 6, 0))
        assert "no manifest says so" in caplog.text
        assert identical(stopped.live(resume=True)), "what was given up is known from then on"

    @pytest.mark.parametrize("until", [3, 4])
    def test_a_damaged_manifest_of_a_later_life(self, stopped, until):
        stopped.live(resume=True, until=until)
        self.harm(stopped, SECOND)
        refused(stopped, CorruptedObjectError, f"{SECOND}.*newest-whole")
        seen = {}
        assert identical(stopped.live(resume="newest-whole", seen=seen))
        assert seen == dict.fromkeys(range(2), (3, 6, 0))

    def test_objects_of_another_run_alone_say_nothing(self, stopped):
        stopped.store.write(keys_lab.state_key(16 * "f", 9, 0), b"of an emptied prefix")
        assert identical(stopped.live(resume=True))
