"""What a journal adds to a backend: it knows what the backend has forgotten."""

from dataclasses import replace

import pytest
from memory_lab import DONE, Memory, lost, unavailable

from diloco_protocol import (
    BackendError,
    FolderJournal,
    InvalidRequestError,
    LaunchError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    SpecVersionError,
    UnavailableError,
)


class TestJournal:
    def test_an_end_that_it_has_is_told_though_the_others_cannot_be_asked_for(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(2, "m:f", run_id="mine")
        executor.world[handles[1]] = DONE
        executor.poll(handles[1])
        seen = []

        def refuse(asked):
            raise BackendError("nobody knows")

        executor._observe_run = refuse
        with pytest.raises(BackendError, match="nobody knows") as caught:
            executor.collect(handles, progress=seen.append)
        assert seen[-1] == {handles[1]: DONE}
        assert "rank 0 of run 'mine' cannot be asked for: 1 of 2" in caught.value.__notes__[0]

    def test_it_answers_for_what_the_backend_has_forgotten(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(2, "m:f", run_id="mine")
        assert executor._journal.handles("mine") == handles
        executor.world.update(dict.fromkeys(handles, DONE))
        first = executor.collect(handles)
        executor.world.clear()
        assert executor.collect(handles) == first
        assert executor.poll(handles[1]) is ReplicaState.SUCCEEDED

    def test_also_in_another_process(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        (handle,) = executor.launch_replicas(1, "m:f")
        executor.world[handle] = DONE
        executor.describe(handle)
        again = ReplicaHandle.from_json(handle.to_json())
        (result,) = Memory({}, journal=FolderJournal(tmp_path)).collect([again])
        assert result["result"] == {"rank": 0}

    @pytest.mark.parametrize("launched_with", [True, False])
    def test_a_purge_writes_down_the_ends_that_nobody_has_seen(self, tmp_path, launched_with):
        """Of a run that was launched without a journal, too."""
        executor = Memory({}, journal=FolderJournal(tmp_path))
        launcher = executor if launched_with else Memory(executor.world)
        handles = launcher.launch_replicas(3, "m:f", run_id="mine")
        executor.world.update(dict.fromkeys(handles, DONE))
        executor.poll(handles[1])
        executor.purge(handles[0])
        executor.world.clear()
        executor.purge(handles[0])
        results = executor.collect(handles)
        assert [result["result"] for result in results] == [{"rank": n} for n in range(3)]

    def test_a_purge_that_cannot_write_the_ends_removes_nothing(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(2, "m:f", run_id="mine")
        executor.world.update(dict.fromkeys(handles, DONE))
        executor._result = lambda handle: unavailable()
        with pytest.raises(UnavailableError, match="no result today") as caught:
            executor.purge(handles[0])
        assert "run 'mine' is not removed" in caught.value.__notes__[0]
        assert handles[0] in executor.world

    def test_a_purge_leaves_a_run_whose_record_is_damaged(self, tmp_path, caplog):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        (handle,) = executor.launch_replicas(1, "m:f", run_id="mine")
        executor.world[handle] = DONE
        executor.poll(handle)
        (file,) = tmp_path.rglob("*.ended.json")
        file.write_text("{")
        with pytest.raises(InvalidRequestError, match=str(file)):
            executor.purge(handle)
        file.unlink()
        executor.purge(handle)
        assert executor.collect([handle])[0]["result"] == {"rank": 0}

    def test_a_purge_refuses_before_a_replica_ends_unseen(self, tmp_path):
        """It would end between the two looks, and nobody would have written down how."""
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(2, "m:f", run_id="mine")
        executor.world[handles[0]] = DONE
        with pytest.raises(InvalidRequestError, match="1 replicas of run 'mine' have not ended"):
            executor.purge(handles[0])
        assert handles[0] in executor.world

    def test_a_purge_of_an_earlier_run_asks_nothing_of_its_namesake(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        (new,) = executor.launch_replicas(1, "m:f", run_id="mine")
        executor.purge(ReplicaHandle(0, "memory", run_id="mine", world_size=1, metadata={"a": "b"}))
        assert new in executor.world

    def test_what_it_knows_is_not_asked_again(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        first, second = executor.launch_replicas(2, "m:f")
        executor.world[first] = DONE
        executor.poll(first)
        executor.world[first] = ReplicaStatus(ReplicaState.FAILED)
        executor.world[second] = DONE
        asked = []
        executor._observe_run = lambda handles: asked.extend(handles) or {
            h: executor.world[h] for h in handles
        }
        assert [result["status"] for result in executor.collect([first, second])] == [
            "succeeded",
            "succeeded",
        ]
        assert asked == [second]

    def test_a_launch_that_it_does_not_take_names_the_living(self, tmp_path):
        (tmp_path / "file").touch()
        executor = Memory({}, journal=FolderJournal(tmp_path / "file" / "journal"))
        with pytest.raises(LaunchError, match="Run 'mine' was started") as caught:
            executor.launch_replicas(2, "m:f", run_id="mine")
        assert caught.value.survivors == tuple(executor.world)

    def test_ctrl_c_while_a_launch_is_written_down_says_that_it_runs(self, tmp_path, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(FolderJournal, "record_launch", interrupted)
        executor = Memory({}, journal=FolderJournal(tmp_path))
        with pytest.raises(KeyboardInterrupt) as caught:
            executor.launch_replicas(2, "m:f", run_id="mine")
        (note,) = caught.value.__notes__
        assert "Run 'mine' was started" in note
        assert "cancel_run('mine')" in note

    def test_an_end_that_it_does_not_take_is_still_told(self, tmp_path, caplog):
        executor = Memory({}, journal=FolderJournal(tmp_path / "journal"))
        (handle,) = executor.launch_replicas(1, "m:f")
        executor.world[handle] = DONE
        executor._result = lambda handle: unavailable()
        assert executor.poll(handle) is ReplicaState.SUCCEEDED
        assert "is not in the journal yet: no result today" in caplog.text
        assert executor._journal.end(handle) is None
        del executor._result
        assert executor.poll(handle) is ReplicaState.SUCCEEDED
        assert executor._journal.end(handle) == (DONE, {"rank": 0})

    @pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}', "", "\0"])
    def test_a_damaged_end_concerns_its_rank_alone(self, tmp_path, caplog, text):
        """The backend is asked about it; if that has forgotten it, its end is unknown."""
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(3, "m:f", run_id="mine")
        executor.world.update(dict.fromkeys(handles, DONE))
        first = executor.collect(handles)
        (file,) = tmp_path.rglob("memory-00001.*.ended.json")
        file.write_text(text)
        assert executor.collect(handles) == first
        assert caplog.text.count(str(file)) == 1
        executor.world.clear()
        results = executor.collect(handles)
        assert [result["status"] for result in results] == ["succeeded", "failed", "succeeded"]
        assert results[0] == first[0]
        assert results[1]["reason"] == "lost"
        assert str(file) in results[1]["error"]
        with pytest.raises((InvalidRequestError, SpecVersionError), match=str(file)):
            executor.describe(handles[1])
        assert executor.attach("mine") == handles
        (alone,) = executor.collect(handles[1:2])
        assert alone == results[1]

    def test_a_damaged_end_of_what_a_backend_does_not_find_is_lost(self, tmp_path):
        def not_found(handles):
            raise ReplicaNotFoundError("there is no such run")

        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(1, "m:f", run_id="mine")
        executor.world.update(dict.fromkeys(handles, DONE))
        executor.collect(handles)
        (file,) = tmp_path.rglob("*.ended.json")
        file.write_text("{")
        executor._observe_run = not_found
        (result,) = executor.collect(handles)
        assert (result["status"], result["reason"]) == ("failed", "lost")
        assert str(file) in result["error"]

    def test_a_lost_result_stays_lost(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(1, "m:f", run_id="mine")
        executor.world.update(dict.fromkeys(handles, DONE))
        executor._result = lambda handle: lost()
        (result,) = executor.collect(handles)
        assert (result["status"], result["result"]) == ("succeeded", None)
        assert result["error"] == "the result is lost: the disk is gone"
        executor.world.clear()
        assert Memory({}, journal=FolderJournal(tmp_path)).collect(handles) == [result]

    def test_it_finds_runs_that_the_backend_has_forgotten(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        handles = executor.launch_replicas(2, "m:f", run_id="mine")
        FolderJournal(tmp_path).record_launch(
            [ReplicaHandle(0, "eks", run_id="mine", world_size=2)]
        )
        executor.world.clear()
        assert executor.attach("mine") == handles
        with pytest.raises(ReplicaNotFoundError):
            executor.attach("other")

    def test_without_one_the_end_is_unknown(self):
        executor = Memory({})
        (handle,) = executor.launch_replicas(1, "m:f")
        executor.world.clear()
        (result,) = executor.collect([handle])
        assert result["reason"] == "lost"


class TestPastItsEnd:
    """What is said of a replica that neither the backend nor the journal knows."""

    HANDLE = ReplicaHandle(7, "memory", {"host": "here"}, run_id="gone", world_size=9)

    def said(self, executor, verb="describe"):
        with pytest.raises(ReplicaNotFoundError) as caught:
            getattr(executor, verb)(self.HANDLE)
        return str(caught.value)

    @pytest.mark.parametrize("verb", ["describe", "poll"])
    def test_without_a_journal_it_is_said_what_would_help(self, verb):
        said = self.said(Memory({}), verb)
        assert said == (
            "memory has no record of rank 7 of run 'gone' ({'host': 'here'}). It was purged, or "
            "was never launched where this executor looks. list_runs() names the runs that are "
            "there; a journal would remember how it ended: give one to the constructor"
        )

    def test_of_metadata_only_the_begin_is_said(self, monkeypatch):
        """Whoever wrote the handle has chosen them."""
        odd = {f"{number}{'n' * 5000}": "v" * 5000 for number in range(50)}
        monkeypatch.setattr(self, "HANDLE", ReplicaHandle(7, "memory", odd, run_id="gone"))
        said = self.said(Memory({}))
        assert len(said) < 4000

    def test_of_metadata_no_secret_is_said(self, monkeypatch):
        odd = {f"postgres://admin:{'hunter2' * 20}@db/x": "1"}
        monkeypatch.setattr(self, "HANDLE", ReplicaHandle(7, "memory", odd, run_id="gone"))
        assert "hunter2" not in self.said(Memory({}))

    def test_with_a_journal_it_is_said_which(self, tmp_path):
        journal = FolderJournal(tmp_path)
        said = self.said(Memory({}, journal=journal))
        assert said.endswith(f"; nor has the journal FolderJournal({str(tmp_path)!r}) its end")

    @pytest.mark.parametrize("journalled", [False, True])
    def test_what_the_backend_says_is_kept(self, tmp_path, journalled):
        def gone(handles):
            raise ReplicaNotFoundError("there is no Job any more")

        executor = Memory({}, journal=FolderJournal(tmp_path) if journalled else None)
        executor._observe_run = gone
        executor.capabilities = replace(executor.capabilities, retention=3600.0)
        said = self.said(executor)
        assert "of run 'gone' ({'host': 'here'}): there is no Job any more. " in said
        assert "It was purged, ended more than 1 h ago, or was never launched" in said
        (entry,) = executor.collect([self.HANDLE], timeout=0)
        assert entry["reason"] == "lost"
