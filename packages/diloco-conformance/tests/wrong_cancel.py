"""Wrong ends of replicas and of whole runs, and wrong closes: C1 to C8."""

import contextlib
from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Remembering, mutant

from diloco_protocol import BackendError, InvalidRequestError, ReplicaNotFoundError, ReplicaState

# --- C1, C2, C3, C5, C6: cancel ---


@mutant("c1_cancelling_twice_is_cancelling_once", "C1")
class TheSecondCancelRaises(ToyExecutor):
    def _stop(self, handle):
        if self.describe(handle).stopping:
            raise InvalidRequestError("it is being cancelled already")
        super()._stop(handle)


@mutant("c2_cancel_changes_nothing_that_has_ended", "C2", "S2", "S4", "S8")
class FailuresCanBeCancelled(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        job = self.cloud.find(handle.metadata)
        if job is not None and job.status == "FAILED":
            self.cloud._end(job, "STOPPED", 143)


@mutant("c3_cancel_has_the_declared_scope", "C3")
class CancelEndsItsNeighbour(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        for other in self._attach(handle.run_id):
            if other.rank == handle.rank + 1:
                super()._stop(other)


@mutant("c4_a_cancel_that_is_not_accepted_raises", "C4")
class CancelRaisesAndDoesIt(ToyExecutor):
    def _stop(self, handle):
        try:
            super()._stop(handle)
        except BackendError:
            self.cloud.find(handle.metadata).stopping = True
            raise


@mutant("c5_what_is_cancelled_ends", "C5")
class OnlyRankZeroCanBeCancelled(ToyExecutor):
    def _stop(self, handle):
        if handle.rank == 0:
            super()._stop(handle)


@mutant("c5_an_end_that_won_the_race_stays", "C5", "S4", "C2")
class CancelBeatsAnyEnd(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cancelled = set()

    def _stop(self, handle):
        super()._stop(handle)
        if not self.describe(handle).state.terminal:
            self.cancelled.add(handle)

    def _observe_run(self, handles):
        seen = dict(super()._observe_run(handles))
        for handle in self.cancelled & seen.keys():
            if seen[handle].state == "succeeded":
                seen[handle] = replace(seen[handle], state=ReplicaState.CANCELLED, exit_code=None)
        return seen


@mutant("c6_cancel_keeps_the_evidence", "G1", "C6", "G2", "G3", "G4", "G5")
class CancelEmptiesTheLog(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        job = self.cloud.find(handle.metadata)
        if job is not None:
            job.log.clear()


# --- C7: whole runs ---


@mutant("c7_a_cancel_that_is_not_accepted_raises", "C7")
class CancelRunStopsAtTheFirstError(ToyExecutor):
    def cancel_run(self, run_id):
        for handle in self.attach(run_id):
            self.cancel(handle)


@mutant("c7_all_that_lives_of_a_run_ends", "C7", "C5")
class CancelRunEndsRankZero(ToyExecutor):
    def cancel_run(self, run_id):
        self.cancel(self.attach(run_id)[0])


@mutant("c7_all_that_lives_of_a_run_ends", "C7", "C5")
class CancelRunStopsAtTheFirstEnd(ToyExecutor):
    def cancel_run(self, run_id):
        for handle in self.attach(run_id):
            if self.poll(handle).terminal:
                break
            self.cancel(handle)


@mutant("c7_all_that_lives_of_a_run_ends", "C7")
class CancelRunRefusesTheEnded(ToyExecutor):
    def cancel_run(self, run_id):
        if any(self.poll(handle).terminal for handle in self.attach(run_id)):
            raise InvalidRequestError("a replica has ended")
        super().cancel_run(run_id)


@mutant("c7_all_that_lives_of_a_run_ends", "C3", "C7")
class CancelRunByPrefix(ToyExecutor):
    def cancel_run(self, run_id):
        super().cancel_run(run_id)
        for other in self.list_runs():
            if other.startswith(run_id):
                super().cancel_run(other)


@mutant("c7_all_that_lives_of_a_run_ends", "C7", "C5")
class CancelRunOfItsOwn(Remembering):
    def cancel_run(self, run_id):
        self.attach(run_id)
        for handle in self.mine.values():
            if handle.run_id == run_id:
                self.cancel(handle)


@mutant("c7_an_unknown_run_is_not_cancelled", "C7")
class CancelRunOfNothing(ToyExecutor):
    def cancel_run(self, run_id):
        with contextlib.suppress(ReplicaNotFoundError):
            super().cancel_run(run_id)


@mutant("c7_a_cancel_that_is_not_accepted_raises", "C7")
class CancelRunSwallowsErrors(ToyExecutor):
    def cancel_run(self, run_id):
        for handle in self.attach(run_id):
            with contextlib.suppress(BackendError):
                self.cancel(handle)


@mutant("c7_where_the_scope_is_the_run_one_call_is_enough", "C7", gang=True)
class CancelRunOneByOne(ToyExecutor):
    def cancel_run(self, run_id):
        for handle in self.attach(run_id):
            self.cancel(handle)


@mutant("c7_where_the_scope_is_the_run_one_call_is_enough", "C7")
class LooksBeforeAndAfterEveryCancel(ToyExecutor):
    def _stop(self, handle):
        self._jobs(handle.run_id)
        super()._stop(handle)
        self._jobs(handle.run_id)


# --- C8: close ---


@mutant("c8_close_ends_nothing", "C8", "C3")
class CloseEndsReplicas(Remembering):
    def close(self):
        for handle in self.mine.values():
            self.cancel(handle)


@mutant("c8_close_ends_nothing", "C8")
class TheSecondCloseRaises(ToyExecutor):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("it is closed")
        self.closed = True


@mutant("c8_close_ends_nothing", "C8", "C6", "R7")
class CloseTidiesUp(Remembering):
    def close(self):
        for handle in self.mine.values():
            if self.cloud.find(handle.metadata) and self.poll(handle).terminal:
                del self.cloud.jobs[handle.metadata["name"]]


class OneByOne(ToyExecutor):
    """Base of those that cancel a run rank by rank, and stop at the first that is refused."""

    def cancel_run(self, run_id):
        handles = self.attach(run_id)
        for number, handle in enumerate(handles):
            try:
                self.cancel(handle)
            except BackendError as error:
                raise BackendError(self.said(handles[number:])) from error

    def said(self, left):
        return f"these ranks are not cancelled: {', '.join(str(one.rank) for one in left)}"


@mutant("c7_a_refused_rank_keeps_no_other_from_its_end", "C7")
class StopsAtTheFirstRefusal(OneByOne):
    pass


@mutant("c7_a_refused_rank_keeps_no_other_from_its_end", "C7")
class StopsAtTheSecondRefusal(OneByOne):
    def cancel_run(self, run_id):
        handles = self.attach(run_id)
        with contextlib.suppress(BackendError):
            self.cancel(handles[0])
        try:
            super().cancel_run(run_id)
        except BackendError as error:
            raise BackendError(self.said(handles)) from error
