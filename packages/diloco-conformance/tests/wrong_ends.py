"""Wrong cancels and collects."""

import contextlib
import threading

from toy_cloud import CloudError
from toy_executor import ToyExecutor, ask, translated
from wrong import mutant

from diloco_protocol import (
    BackendError,
    Capabilities,
    ReplicaNotFoundError,
    ReplicaState,
)


@mutant("C4")
class SwallowedCancelErrors(ToyExecutor):
    def _stop(self, handle):
        with contextlib.suppress(BackendError):
            super()._stop(handle)


@mutant("C4")
class ConflictSwallowed(ToyExecutor):
    def _stop(self, handle):
        try:
            self.cloud.stop(handle.metadata["name"])
        except CloudError as error:
            if error.code not in {"NotFound", "Conflict"}:
                raise translated(error) from error


@mutant("C2", "S2")
class CancelOverwritesTerminal(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        job = self.cloud.jobs.get(handle.metadata["name"])
        if job is not None and not job.live:
            job.end("STOPPED", 143)


@mutant("C3")
class UndeclaredGang(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = Capabilities("replica", "gang", preemptible=True)


UndeclaredGang = mutant("C3", gang=True)(UndeclaredGang)


@mutant("C5")
class DeclaredGangThatIsNone(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = Capabilities("gang", "replica", preemptible=True)


@mutant("C1")
class CancelOfWhatIsGoneRaises(ToyExecutor):
    def _stop(self, handle):
        self._job(handle)
        super()._stop(handle)


@mutant("C6", "S4", "S6", "C5", "H3")
class CancelDeletes(ToyExecutor):
    def _stop(self, handle):
        super()._stop(handle)
        self.cloud.delete(handle.run_id)


@mutant("C6", "S4")
class PurgesTheLiving(ToyExecutor):
    def _purge(self, handle):
        ask(lambda: self.cloud.delete(handle.run_id))


@mutant("R3", "R5", "S2", "S4", "R7")
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


@mutant("R5", "R3")
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


@mutant("R2")
class SerialDeadline(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        return [
            super(SerialDeadline, self).collect([handle], timeout=timeout, progress=progress)[0]
            for handle in handles
        ]


@mutant("R2")
class CollectKillsAtItsDeadline(ToyExecutor):
    def collect(self, handles, **options):
        results = super().collect(handles, **options)
        for handle, entry in zip(handles, results, strict=True):
            if not ReplicaState(entry["status"]).terminal:
                self.cloud.jobs[handle.metadata["name"]].end("FAILED", 143)
        return results


@mutant("R2")
class CollectGivesUpEarly(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        return super().collect(handles, timeout=0, progress=progress)


@mutant("R2")
class HangsOnLargeResults(ToyExecutor):
    def _result(self, handle):
        result = super()._result(handle)
        if isinstance(result, str) and len(result) > 65_536:
            threading.Event().wait(60)
        return result


@mutant("R2")
class IgnoresItsDeadline(ToyExecutor):
    def collect(self, handles, *, timeout=None, progress=None):
        return super().collect(
            handles, timeout=None if timeout is None else timeout + 1000, progress=progress
        )


@mutant("R6")
class NoRetry(ToyExecutor):
    def collect(self, handles, **options):
        for handle in handles:
            with contextlib.suppress(ReplicaNotFoundError):
                self.describe(handle)
        return super().collect(handles, **options)


@mutant("R6", "R7", "S4")
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
            }
            return [{**entry, "rank": handle.rank, "run_id": handle.run_id} for handle in handles]


@mutant("R1")
class SortedResults(ToyExecutor):
    def collect(self, handles, **options):
        return sorted(super().collect(handles, **options), key=lambda entry: entry["rank"])


@mutant("R5", "R1", "R3", "S4", "R4", "R7", "S8")
class ResultsByRank(ToyExecutor):
    def collect(self, handles, **options):
        by_rank = {entry["rank"]: entry for entry in super().collect(handles, **options)}
        return [{**by_rank[handle.rank], "run_id": handle.run_id} for handle in handles]


@mutant("R7")
class LostIsSucceeded(ToyExecutor):
    def collect(self, handles, **options):
        results = super().collect(handles, **options)
        for entry in results:
            if entry["reason"] == "lost":
                entry.update(status="succeeded", exit_code=0, error=None, reason="completed")
        return results


@mutant("R8")
class OneCallPerRank(ToyExecutor):
    def _observe_run(self, handles):
        seen = {}
        for handle in handles:
            seen.update(super()._observe_run([handle]))
        return seen
