"""Wrong waits, and what collect says wrongly: R1 to R10."""

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import BackendError, ReplicaState, ThrottledError


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
