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


@mutant("r7_a_lost_replica_has_failed", "R7", "S6")
class NotFoundIsCancelled(ToyExecutor):
    def _observe_run(self, handles):
        missing = {
            handle: ReplicaStatus(ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED)
            for handle in handles
        }
        return {**missing, **super()._observe_run(handles)}


@mutant("r7_a_lost_replica_has_failed", "R7", "S6")
class NotFoundIsSucceeded(ToyExecutor):
    def _observe_run(self, handles):
        missing = {handle: ReplicaStatus(ReplicaState.SUCCEEDED, exit_code=0) for handle in handles}
        return {**missing, **super()._observe_run(handles)}

    def _result(self, handle):
        try:
            return super()._result(handle)
        except ReplicaNotFoundError:
            return None


@mutant("s4_every_rank_for_itself", "S4")
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


@mutant("r3_what_is_being_ended_is_not_final", "S4", "S2", "S5", "R3", "S8")
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


@mutant("s4_every_run_for_itself", "S4", "C5")
class CancelledIsFailed(Restating):
    def restate(self, handle, status, seen):
        return replace(status, state=ReplicaState.FAILED) if status.state == "cancelled" else status


@mutant("s5_cancelled_only_when_the_resources_are_gone", "S5")
class CancelledTooEarly(Restating):
    def restate(self, handle, status, seen):
        if status.stopping:
            return replace(status, state=ReplicaState.CANCELLED, stopping=False, exit_code=143)
        return status


@mutant("s7_a_timeout_is_a_failure", "S7")
class TimeoutIsCancelled(Restating):
    def restate(self, handle, status, seen):
        if status.native == "TIMED_OUT":
            return replace(status, state=ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED)
        return status


@mutant("s7_a_timeout_is_a_failure", "S7")
class TimeoutIsAnyFailure(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.ERROR) if status.native == "TIMED_OUT" else status


@mutant("s3_states_go_forward", "S3", "S4")
class PendingFlap(Restating):
    def restate(self, handle, status, seen):
        if status.state == "running" and status.stopping:
            return replace(status, state=ReplicaState.PENDING)
        return status


@mutant("s3_a_preempted_replica_is_pending_with_the_next_attempt", "S3", "S8")
class AttemptsAreNotCounted(Restating):
    def restate(self, handle, status, seen):
        return replace(status, attempt=1)


@mutant("s1_states_are_the_five_and_poll_agrees_with_describe", "S1")
class TextForStates(Restating):
    def restate(self, handle, status, seen):
        return replace(status, state=str(status.state))


@mutant("c1_cancelling_twice_is_cancelling_once", "S8")
class StoppingIsNotTold(Restating):
    def restate(self, handle, status, seen):
        return replace(status, stopping=False)


@mutant("r4_exit_codes", "R4", "S8")
class InventedExitCodes(Restating):
    def restate(self, handle, status, seen):
        return replace(status, exit_code=1) if status.state == "failed" else status


@mutant("c1_cancelling_twice_is_cancelling_once", "R4")
class FailuresExitWithZero(Restating):
    def restate(self, handle, status, seen):
        return replace(status, exit_code=0) if status.state == "cancelled" else status


@mutant("s8_exit_codes_and_reasons_are_the_true_ones", "S8")
class OutOfMemoryIsAnyError(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.ERROR) if status.reason is Reason.OOM else status


@mutant("s6_a_backend_that_cannot_be_asked_is_an_exception", "S6")
class UnavailableIsPending(ToyExecutor):
    def _observe_run(self, handles):
        try:
            return super()._observe_run(handles)
        except UnavailableError:
            return {handle: ReplicaStatus(ReplicaState.PENDING) for handle in handles}


@mutant("s6_a_backend_that_cannot_be_asked_is_an_exception", "S6")
class ForbiddenIsNotFound(ToyExecutor):
    def _observe_run(self, handles):
        try:
            return super()._observe_run(handles)
        except BackendError as error:
            if error.retryable:
                raise
            return {}


@mutant("s4_poll_and_describe_are_one", "S4")
class PollSaysSomethingElse(ToyExecutor):
    def poll(self, handle):
        state = super().poll(handle)
        return ReplicaState.RUNNING if state is ReplicaState.PENDING else state


@mutant("s9_a_failure_has_the_declared_scope", "S9", gang=True)
class UndeclaredFailureGang(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, failure_scope="replica")
