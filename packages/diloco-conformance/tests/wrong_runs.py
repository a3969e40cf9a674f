"""Wrong ends of whole runs, wrong purges, wrong closes, wrong waits, wrong checks."""

import contextlib
from dataclasses import replace

from toy_executor import ToyExecutor, ask
from wrong import Remembering, mutant

from diloco_protocol import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    ReplicaNotFoundError,
    ReplicaState,
    ThrottledError,
)

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


# --- C9: purge ---


@mutant("c9_a_purge_that_fails_raises", "C9", "C6")
class SwallowedPurgeErrors(ToyExecutor):
    def _delete(self, handle):
        with contextlib.suppress(BackendError):
            super()._delete(handle)


@mutant("c9_a_purge_that_fails_raises", "C9", "C6")
class PurgeOfAPartIsDone(ToyExecutor):
    """What was begun is not gone on with."""

    def _purge(self, handle):
        job = self.cloud.find(handle.metadata)
        if job is not None and not getattr(job, "purged", False):
            job.purged = True
            super()._purge(handle)


@mutant("c9_who_cannot_see_whether_something_lives_does_not_purge", "C9", "C6")
class PurgesInTheDark(ToyExecutor):
    def _purge(self, handle):
        try:
            super()._purge(handle)
        except InvalidRequestError:
            raise
        except BackendError:
            for name in list(self.cloud.jobs):
                if name.startswith(f"{handle.run_id}-"):
                    del self.cloud.jobs[name]


@mutant("c9_runs_whose_names_begin_alike_are_not_purged", "C6", "C9", "S14")
class PurgeByPrefix(ToyExecutor):
    def _purge(self, handle):
        super()._purge(handle)
        for name, job in list(self.cloud.jobs.items()):
            if name.startswith(handle.run_id) and not job.live:
                del self.cloud.jobs[name]


# --- R: waiting ---


@mutant("r1_results_follow_the_handles", "R1")
class DoublesAreDropped(ToyExecutor):
    def collect(self, handles, **options):
        return super().collect(list(dict.fromkeys(handles)), **options)


@mutant("r4_exit_codes", "R4", "S8")
class ExitCodesAreZeroOrOne(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            entry["exit_code"] = entry["exit_code"] and 1
        return entries


@mutant("r4_exit_codes", "R4")
class TheCancelledHaveExitCodes(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            if entry["status"] == "cancelled":
                entry["exit_code"] = 143
        return entries


@mutant("r3_collecting_again_gives_the_same", "R3")
class CountsHowOftenItWasAsked(ToyExecutor):
    """In the error, so that no two answers are the same."""

    asked = 0

    def collect(self, handles, **options):
        self.asked += 1
        entries = super().collect(handles, **options)
        return [
            {**entry, "error": entry["error"] and f"{entry['error']} ({self.asked})"}
            for entry in entries
        ]


@mutant("r6_errors_that_pass_are_absorbed", "R6")
class ThrottlingIsFinal(ToyExecutor):
    def _observe_run(self, handles):
        try:
            return super()._observe_run(handles)
        except ThrottledError as error:
            raise BackendError(str(error)) from error


@mutant("r7_a_lost_replica_has_failed", "R7")
class LostHasFailedSomehow(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            if entry["reason"] == "lost":
                entry["reason"] = "error"
        return entries


@mutant("r8_ends_that_were_seen_are_not_asked_for_again", "R8")
class AsksForEveryRankAgain(ToyExecutor):
    def collect(self, handles, *, progress=None, **options):
        def look(statuses):
            for handle in handles:
                self.describe(handle)
            if progress is not None:
                progress(statuses)

        return super().collect(handles, progress=look, **options)


@mutant("r9_without_a_timeout_it_waits_for_all", "R9")
class NoTimeoutIsNoTime(ToyExecutor):
    def collect(self, handles, *, timeout=0, **options):
        return super().collect(handles, timeout=timeout, **options)


@mutant("r9_without_a_timeout_it_waits_for_all", "R9")
class NoTimeoutIsAMinute(ToyExecutor):
    def collect(self, handles, *, timeout=60, **options):
        return super().collect(handles, timeout=timeout, **options)


@mutant("r9_without_a_timeout_it_waits_for_all", "R9")
class ReturnsAtTheFirstEnd(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        while timeout is None:
            entries = super().collect(handles, timeout=0, progress=progress)
            if any(ReplicaState(entry["status"]).terminal for entry in entries):
                return entries
            self._backoff.sleep(1.0)
        return super().collect(handles, timeout=timeout, progress=progress)


@mutant("r9_what_has_ended_is_not_waited_for", "R9", "R2")
class WaitsBeforeItLooks(ToyExecutor):
    def collect(self, handles, *, timeout=None, **options):
        if timeout is None:
            self._backoff.sleep(30.0)
        return super().collect(handles, timeout=timeout, **options)


@mutant("r10_it_says_what_describe_says", "R10")
class CollectSaysTheFirstAttempt(ToyExecutor):
    def collect(self, handles, **options):
        return [{**entry, "attempt": 1} for entry in super().collect(handles, **options)]


@mutant("r10_it_says_what_describe_says", "R10")
class CollectDropsSignals(ToyExecutor):
    def collect(self, handles, **options):
        return [{**entry, "signal": None} for entry in super().collect(handles, **options)]


@mutant("r10_it_says_what_describe_says", "S8", "R10")
class CollectHasItsOwnReasons(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            if entry["reason"] == "oom":
                entry["reason"] = "error"
        return entries


@mutant("r10_only_a_success_has_a_result", "R10")
class TheErrorIsTheResult(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            if entry["status"] == "failed":
                entry["result"] = entry["error"]
        return entries


# --- D1, D3 ---


@mutant("d1_what_it_cannot_do_is_declared", "D1")
class ScopeInItsOwnWords(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, cancel_scope="job")


@mutant("d1_what_it_cannot_do_is_declared", "D1")
class DeclaresAStreamOfItsOwn(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, log_streams=("combined", "syslog"))


@mutant("d3_check_starts_nothing", "D3")
class CheckTriesALaunch(ToyExecutor):
    def _findings(self, request):
        self._submit(request)
        return super()._findings(request)


@mutant("d3_check_starts_nothing", "D3")
class CheckSaysOk(ToyExecutor):
    def check(self, *arguments, **options):
        super().check(*arguments, **options)
        return ["ok"]


@mutant("d3_check_starts_nothing", "D3")
class CheckTakesAnything(ToyExecutor):
    def check(self, n_replicas=1, **options):
        return []


# --- H6: finding ---


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class NoAnswerIsNoRun(ToyExecutor):
    def exists(self, run_id):
        try:
            return super().exists(run_id)
        except BackendError:
            return False


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class NoAnswerIsAnEmptyList(ToyExecutor):
    def _list_runs(self):
        try:
            return super()._list_runs()
        except BackendError:
            return []


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class ForbiddenRunsAreUnknown(ToyExecutor):
    def _attach(self, run_id):
        try:
            return super()._attach(run_id)
        except ForbiddenError as error:
            raise ReplicaNotFoundError(f"there is no run {run_id!r}") from error


@mutant("h6_exists_is_true", "H6")
class OnlyTheLivingExist(ToyExecutor):
    def exists(self, run_id):
        jobs = ask(lambda: self.cloud.describe(run_id)).values()
        return any(job.live for job in jobs)


@mutant("h6_exists_is_true", "H6")
class ExistsByPrefix(ToyExecutor):
    def exists(self, run_id):
        return any(run.startswith(run_id) for run in self.list_runs())
