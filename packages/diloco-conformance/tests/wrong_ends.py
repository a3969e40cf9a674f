"""Wrong cancels and collects."""

import contextlib
import threading
from dataclasses import replace

from toy_cloud import CloudError
from toy_executor import ToyExecutor, translated
from wrong import mutant

from diloco_protocol import (
    BackendError,
    ReplicaNotFoundError,
    ReplicaState,
)


@mutant("c4_a_cancel_that_is_not_accepted_raises", "C4")
class SwallowedCancelErrors(ToyExecutor):
    def _stop(self, handle):
        with contextlib.suppress(BackendError):
            super()._stop(handle)


@mutant("c4_a_cancel_that_is_not_accepted_raises", "C4")
class ConflictSwallowed(ToyExecutor):
    def _stop(self, handle):
        try:
            self.cloud.stop(handle.metadata["name"], handle.metadata["uid"])
        except CloudError as error:
            if error.code not in {"NotFound", "Conflict"}:
                raise translated(error) from error


@mutant("c2_cancel_changes_nothing_that_has_ended", "C2", "S2")
class CancelOverwritesTerminal(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        job = self.cloud.jobs.get(handle.metadata["name"])
        if job is not None and not job.live:
            self.cloud._end(job, "STOPPED", 143)


@mutant("c3_cancel_has_the_declared_scope", "C3", gang=True)
class UndeclaredGang(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, cancel_scope="replica")


@mutant("c1_cancelling_twice_is_cancelling_once", "C5")
class DeclaredGangThatIsNone(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, cancel_scope="gang")


@mutant("c1_cancelling_what_is_gone_is_no_error", "C1")
class CancelOfWhatIsGoneRaises(ToyExecutor):
    def _stop(self, handle):
        self._job(handle)
        super()._stop(handle)


@mutant("c6_cancel_keeps_the_evidence", "C6", "S4", "S6", "C5", "H3")
class CancelDeletes(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        self._delete(handle)


@mutant("c6_purge_is_refused_while_something_lives", "C6", "S4")
class PurgesTheLiving(ToyExecutor):
    def _purge(self, handle):
        for each in self._jobs(handle.run_id):
            self._delete(each)


@mutant("r3_collecting_again_gives_the_same", "R3", "R5", "S2", "S4", "R7")
class DrainingCollect(ToyExecutor):
    """Failure turned success on the second collect: what was read once is not there any more."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.drained = set()

    def collect(self, handles, **options):
        results = super().collect(handles, **options)
        for handle, entry in zip(handles, results, strict=True):
            if handle in self.drained and entry["status"] == "failed":
                entry.update(status="succeeded", exit_code=0, error=None, result=None)
            if ReplicaState(entry["status"]).terminal:
                self.drained.add(handle)
        return results


@mutant("r5_every_replica_has_its_own_result", "R5", "R3")
class ResultsLostByPolling(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.polled = set()

    def describe(self, handle):
        status = super().describe(handle)
        if status.state == "succeeded":
            self.polled.add(handle)
        return status

    def _result(self, handle):
        return None if handle in self.polled else super()._result(handle)


@mutant("r2_it_waits_for_what_ends_meanwhile", "R2")
class SerialDeadline(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        return [
            super(SerialDeadline, self).collect([handle], timeout=timeout, progress=progress)[0]
            for handle in handles
        ]


@mutant("r2_the_deadline_is_kept_and_nothing_is_ended", "R2")
class CollectKillsAtItsDeadline(ToyExecutor):
    def collect(self, handles, **options):
        results = super().collect(handles, **options)
        for handle, entry in zip(handles, results, strict=True):
            if not ReplicaState(entry["status"]).terminal:
                self.cloud.end(handle.metadata["name"], "FAILED", 143)
        return results


@mutant("r2_it_waits_for_what_ends_meanwhile", "R2")
class CollectGivesUpEarly(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        return super().collect(handles, timeout=0, progress=progress)


@mutant("r5_large_results_arrive", "R2")
class HangsOnLargeResults(ToyExecutor):
    def _result(self, handle):
        result = super()._result(handle)
        if isinstance(result, str) and len(result) > 65_536:
            threading.Event().wait(60)
        return result


@mutant("r2_the_deadline_is_kept_and_nothing_is_ended", "R2")
class IgnoresItsDeadline(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        return super().collect(
            handles, timeout=None if timeout is None else timeout + 1000, progress=progress
        )


@mutant("r6_errors_that_pass_are_absorbed", "R6")
class NoRetry(ToyExecutor):
    def collect(self, handles, **options):
        for handle in handles:
            with contextlib.suppress(ReplicaNotFoundError):
                self.describe(handle)
        return super().collect(handles, **options)


@mutant("r6_other_errors_are_raised", "S4", "R6", "R7")
class EveryErrorIsLost(ToyExecutor):
    def collect(self, handles, **options):
        try:
            return super().collect(handles, **options)
        except BackendError:
            entry = {
                "status": "failed",
                "exit_code": 1,
                "error": "lost",
                "result": None,
                "reason": "lost",
                "signal": None,
                "attempt": 1,
            }
            return [
                {**handle.metadata, **entry, "rank": handle.rank, "run_id": handle.run_id}
                for handle in handles
            ]


@mutant("r1_results_follow_the_handles", "R1")
class SortedResults(ToyExecutor):
    def collect(self, handles, **options):
        return sorted(super().collect(handles, **options), key=lambda entry: entry["rank"])


@mutant("r5_every_replica_has_its_own_result", "R5", "R1", "R3", "S4", "R4", "R7", "S8")
class ResultsByRank(ToyExecutor):
    def collect(self, handles, **options):
        by_rank = {entry["rank"]: entry for entry in super().collect(handles, **options)}
        return [{**by_rank[handle.rank], "run_id": handle.run_id} for handle in handles]


@mutant("r7_a_lost_replica_has_failed", "R7")
class LostIsSucceeded(ToyExecutor):
    def collect(self, handles, **options):
        results = super().collect(handles, **options)
        for entry in results:
            if entry["reason"] == "lost":
                entry.update(status="succeeded", exit_code=0, error=None, reason="completed")
        return results


@mutant("r8_the_calls_of_a_look_do_not_grow_with_the_ranks", "R8")
class OneCallPerRank(ToyExecutor):
    def _observe_run(self, handles):
        seen = {}
        for handle in handles:
            seen.update(super()._observe_run([handle]))
        return seen
