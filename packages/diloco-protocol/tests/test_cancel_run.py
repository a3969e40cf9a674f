"""Cancelling a whole run, whether a backend ends it replica by replica or at once."""

import threading

import pytest
from memory_lab import DONE, Memory

from diloco_protocol import (
    BackendError,
    Capabilities,
    FolderJournal,
    ForbiddenError,
    InvalidRequestError,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    UnavailableError,
)


class Gang(Memory):
    """Ends all of a run at once."""

    capabilities = Capabilities(cancel_scope="gang")

    def _stop(self, handle):
        self.hooks.append("stop")
        for each in self.world:
            if each.run_id == handle.run_id:
                self.world[each] = ReplicaStatus(ReplicaState.CANCELLED)


def states(executor, handles):
    return [str(executor.poll(handle)) for handle in handles]


class TestCancelRun:
    def test_every_rank_of_this_run_and_no_other(self, executor):
        ours = executor.launch_replicas(3, "m:f", run_id="mine-1")
        others = executor.launch_replicas(2, "m:f", run_id="mine-10")
        executor.world[ours[1]] = DONE
        executor.cancel_run("mine-1")
        assert states(executor, ours) == ["cancelled", "succeeded", "cancelled"]
        assert states(executor, others) == ["running", "running"]
        executor.cancel_run("mine-1")
        assert states(executor, ours) == ["cancelled", "succeeded", "cancelled"]

    def test_one_call_where_it_ends_the_whole_run(self):
        executor = Gang({})
        handles = executor.launch_replicas(3, "m:f", run_id="mine")
        executor.cancel_run("mine")
        assert states(executor, handles) == ["cancelled"] * 3
        assert executor.hooks.count("stop") == 1

    def test_the_ranks_are_cancelled_at_the_same_time(self, executor):
        executor.launch_replicas(3, "m:f", run_id="mine")
        together = threading.Barrier(3)
        executor._stop = lambda handle: together.wait(60)
        executor.cancel_run("mine")
        assert not together.broken

    def test_an_unknown_run_is_an_error(self, executor):
        executor.launch_replicas(1, "m:f", run_id="mine")
        for name in ("other", "min", "../mine", "Mine"):
            with pytest.raises(ReplicaNotFoundError):
                executor.cancel_run(name)
        with pytest.raises(InvalidRequestError, match="run_id must be non-empty text"):
            executor.cancel_run(None)
        assert "stop" not in executor.hooks

    def test_a_run_that_is_gone_is_passed_over_if_the_journal_knows_it(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        executor.launch_replicas(2, "m:f", run_id="mine")
        executor.world.clear()
        executor.cancel_run("mine")
        assert executor.world == {}

    @pytest.mark.parametrize(
        ("second", "retryable"), [(UnavailableError, True), (ForbiddenError, False)]
    )
    def test_refusals_are_named_and_the_others_are_cancelled(self, executor, second, retryable):
        handles = executor.launch_replicas(4, "m:f", run_id="mine")
        refusals = {1: UnavailableError("not today"), 3: second("not you")}

        def stop(handle):
            if handle.rank in refusals:
                raise refusals[handle.rank]
            Memory._stop(executor, handle)

        executor._stop = stop
        told = (
            "2 of the 4 replicas of run 'mine' could not be cancelled .rank 1, 3.*Rank 1: not today"
        )
        with pytest.raises(BackendError, match=told) as caught:
            executor.cancel_run("mine")
        assert caught.value.retryable is retryable
        assert states(executor, handles) == ["cancelled", "running", "cancelled", "running"]
        del executor._stop
        executor.cancel_run("mine")
        assert states(executor, handles) == ["cancelled"] * 4

    def test_of_others_nothing_is_said_where_there_are_none(self, executor):
        executor.launch_replicas(2, "m:f", run_id="mine")

        def stop(handle):
            raise ForbiddenError("not you")

        executor._stop = stop
        with pytest.raises(BackendError, match=r"\(rank 0, 1\)\. Rank 0: not you"):
            executor.cancel_run("mine")

    def test_a_mistake_in_a_backend_is_not_swallowed(self, executor):
        executor.launch_replicas(2, "m:f", run_id="mine")
        executor._stop = lambda handle: {}["no such key"]
        with pytest.raises(KeyError):
            executor.cancel_run("mine")
