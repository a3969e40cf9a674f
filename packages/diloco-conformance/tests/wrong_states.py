"""Wrong things said of a replica."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Restating, mutant

from diloco_protocol import (
    BackendError,
    Reason,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    UnavailableError,
)


@mutant("S6", "R7")
class NotFoundIsCancelled(ToyExecutor):
    def _observe_run(self, handles):
        missing = {
            handle: ReplicaStatus(ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED)
            for handle in handles
        }
        return {**missing, **super()._observe_run(handles)}


@mutant("S6", "R7")
class NotFoundIsSucceeded(ToyExecutor):
    def _observe_run(self, handles):
        missing = {handle: ReplicaStatus(ReplicaState.SUCCEEDED, exit_code=0) for handle in handles}
        return {**missing, **super()._observe_run(handles)}

    def _result(self, handle):
        try:
            return super()._result(handle)
        except ReplicaNotFoundError:
            return None


@mutant("S4")
class AnyActiveIsRunning(Restating):
    def restate(self, handle, status, seen):
        running = any(one.state is ReplicaState.RUNNING for one in seen.values())
        jobs = self.cloud.describe(handle.run_id).values()
        running = running or any(job.status == "RUNNING" for job in jobs)
        return (
            replace(status, state=ReplicaState.RUNNING)
            if status.state == "pending" and running
            else status
        )


@mutant("S2", "S4", "S5", "R3", "S8")
class StoppingIsTerminal(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cache = {}

    def _observe_run(self, handles):
        for handle, status in super()._observe_run(handles).items():
            if status.stopping and handle not in self.cache:
                self.cache[handle] = replace(
                    status, state=ReplicaState.FAILED, stopping=False, exit_code=1
                )
            elif handle not in self.cache or not self.cache[handle].state.terminal:
                self.cache[handle] = status
        return {handle: self.cache[handle] for handle in handles if handle in self.cache}


@mutant("S4", "C5")
class CancelledIsFailed(Restating):
    def restate(self, handle, status, seen):
        return replace(status, state=ReplicaState.FAILED) if status.state == "cancelled" else status


@mutant("S5")
class CancelledTooEarly(Restating):
    def restate(self, handle, status, seen):
        if status.stopping:
            return replace(status, state=ReplicaState.CANCELLED, stopping=False, exit_code=143)
        return status


@mutant("S7")
class TimeoutIsCancelled(Restating):
    def restate(self, handle, status, seen):
        if status.native == "TIMED_OUT":
            return replace(status, state=ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED)
        return status


@mutant("S7")
class TimeoutIsAnyFailure(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.ERROR) if status.native == "TIMED_OUT" else status


@mutant("S3", "S4")
class PendingFlap(Restating):
    def restate(self, handle, status, seen):
        if status.state == "running" and status.stopping:
            return replace(status, state=ReplicaState.PENDING)
        return status


@mutant("S8", "S3")
class AttemptsAreNotCounted(Restating):
    def restate(self, handle, status, seen):
        return replace(status, attempt=1)


@mutant("S1")
class TextForStates(Restating):
    def restate(self, handle, status, seen):
        return replace(status, state=str(status.state))


@mutant("S8")
class StoppingIsNotTold(Restating):
    def restate(self, handle, status, seen):
        return replace(status, stopping=False)


@mutant("S8", "R4")
class InventedExitCodes(Restating):
    def restate(self, handle, status, seen):
        return replace(status, exit_code=1) if status.state == "failed" else status


@mutant("R4")
class FailuresExitWithZero(Restating):
    def restate(self, handle, status, seen):
        return replace(status, exit_code=0) if status.state == "cancelled" else status


@mutant("S8")
class OutOfMemoryIsAnyError(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.ERROR) if status.reason is Reason.OOM else status


@mutant("S6")
class UnavailableIsPending(ToyExecutor):
    def _observe_run(self, handles):
        try:
            return super()._observe_run(handles)
        except UnavailableError:
            return {handle: ReplicaStatus(ReplicaState.PENDING) for handle in handles}


@mutant("S6")
class ForbiddenIsNotFound(ToyExecutor):
    def _observe_run(self, handles):
        try:
            return super()._observe_run(handles)
        except BackendError as error:
            if error.retryable:
                raise
            return {}


@mutant("S8")
class PollSaysSomethingElse(ToyExecutor):
    def poll(self, handle):
        state = super().poll(handle)
        return ReplicaState.RUNNING if state is ReplicaState.PENDING else state


@mutant("S9")
class UndeclaredFailureGang(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, failure_scope="replica")


UndeclaredFailureGang = mutant("S9", gang=True)(UndeclaredFailureGang)
