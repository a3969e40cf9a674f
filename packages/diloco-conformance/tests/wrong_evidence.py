"""Wrong conclusions from what is left of a replica: S8, S15, R5, R12."""

import json
from dataclasses import replace

from toy_executor import ToyExecutor
from toy_states import status_of
from wrong import Remembering, Restating, mutant

from diloco_protocol import (
    InvalidRequestError,
    Reason,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    UnavailableError,
)

CODES = "s8_an_exit_code_alone_proves_nothing"
STOPPED = "s15_who_was_stopped_from_outside_is_cancelled"
LATEST = "r5_the_result_is_that_of_the_attempt_that_succeeded"
LOST = "r12_a_lost_result_is_said_to_be_lost"
DAMAGED = "r12_a_damaged_result_is_said_to_be_lost"


# --- exit codes ---


@mutant(CODES, "S8", "S7")
class A124IsATimeout(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.TIMEOUT) if status.exit_code == 124 else status


@mutant(CODES, "S8")
class A137IsOutOfMemory(Restating):
    def restate(self, handle, status, seen):
        return replace(status, reason=Reason.OOM) if status.exit_code == 137 else status


@mutant(CODES, "S4", "S8")
class A143IsACancel(Restating):
    def restate(self, handle, status, seen):
        if status.exit_code != 143:
            return status
        return replace(status, state=ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED)


# --- stopped from outside ---


@mutant(STOPPED, "S15")
class EveryStopIsACancel(Restating):
    def restate(self, handle, status, seen):
        if status.state is not ReplicaState.CANCELLED:
            return status
        return replace(status, reason=Reason.CANCEL_REQUESTED)


@mutant(STOPPED, "S15")
class AStopIsAFailure(Restating):
    def restate(self, handle, status, seen):
        if status.reason is not Reason.STOPPED_EXTERNALLY:
            return status
        return replace(status, state=ReplicaState.FAILED, reason=Reason.PLATFORM, message="gone")


@mutant(STOPPED, "S15")
class ACancelThatComesLaterExplainsIt(Restating):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cloud.marks = getattr(self.cloud, "marks", set())

    def _stop(self, handle):
        super()._stop(handle)
        self.cloud.marks.add(handle)

    def restate(self, handle, status, seen):
        if status.state is not ReplicaState.CANCELLED or handle not in self.cloud.marks:
            return status
        return replace(status, reason=Reason.CANCEL_REQUESTED)


@mutant("s15_a_cancel_is_not_a_stop_from_outside", "S15", "S8")
class WhoHasNotCancelledSeesAStop(Restating):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mine = set()

    def _stop(self, handle):
        super()._stop(handle)
        self.mine.add(handle.run_id)

    def restate(self, handle, status, seen):
        if status.state is not ReplicaState.CANCELLED or handle.run_id in self.mine:
            return status
        return replace(status, reason=Reason.STOPPED_EXTERNALLY)


# --- whose result ---


@mutant(LATEST, "R5")
class TheFirstResultThereIs(ToyExecutor):
    def _result(self, handle):
        outputs = self._job(handle).outputs
        return json.loads(outputs[min(outputs)])


@mutant(LATEST, "R5")
class AnyResultForNone(ToyExecutor):
    def _result(self, handle):
        outputs = self._job(handle).outputs
        results = [json.loads(outputs[attempt]) for attempt in sorted(outputs, reverse=True)]
        return next((result for result in results if result is not None), None)


@mutant(LATEST, "S4")
class WhoHasReturnedHasSucceeded(ToyExecutor):
    def _status(self, job):
        status = status_of(job)
        if status.state is ReplicaState.PENDING and job.outputs:
            return replace(
                status, state=ReplicaState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0
            )
        return status


# --- what is lost ---


class Losing(ToyExecutor):
    """Base of those that do not say that a result is lost."""

    def _result(self, handle):
        try:
            return super()._result(handle)
        except ResultLostError as error:
            return self.instead(handle, error)


@mutant(LOST, "R12")
class ALostResultIsNone(Losing):
    def instead(self, handle, error):
        return None


@mutant(LOST, "R12")
class ALostResultIsASentence(Losing):
    def instead(self, handle, error):
        return str(error)


@mutant(LOST, "R12")
class ALostResultMayComeLater(Losing):
    def instead(self, handle, error):
        raise UnavailableError(str(error)) from error


@mutant(LOST, "R12")
class ALostResultIsAWrongRequest(Losing):
    def instead(self, handle, error):
        raise InvalidRequestError(str(error)) from error


@mutant(LOST, "R12")
class TheSiblingsResultWillDo(Losing):
    def instead(self, handle, error):
        others = [one for one in self._attach(handle.run_id) if one != handle]
        return super()._result(others[-1])


@mutant(LOST, "R12", "S4")
class WhoHasNoResultHasFailed(Restating):
    def restate(self, handle, status, seen):
        if status.state is ReplicaState.SUCCEEDED and not self._job(handle).outputs:
            return replace(status, state=ReplicaState.FAILED, reason=Reason.ERROR, exit_code=1)
        return status


@mutant(DAMAGED, "R12")
class NotJsonIsAnyError(ToyExecutor):
    def _result(self, handle):
        job = self._job(handle)
        return json.loads(job.outputs[job.attempt])


@mutant(DAMAGED, "R12")
class NotJsonIsText(Losing):
    def instead(self, handle, error):
        job = self._job(handle)
        return job.outputs[job.attempt].decode(errors="replace")


@mutant(DAMAGED, "R12", "S4")
class NotJsonIsAWrongRequestOfWhoeverAsks(ToyExecutor):
    def _observe_run(self, handles):
        for handle in handles:
            for output in self._job(handle).outputs.values():
                try:
                    json.loads(output)
                except ValueError as error:
                    raise InvalidRequestError(f"the report is damaged: {error}") from error
        return super()._observe_run(handles)


@mutant(DAMAGED, "R12")
class NothingIsNone(ToyExecutor):
    def _result(self, handle):
        job = self._job(handle)
        return None if job.outputs.get(job.attempt) == b"" else super()._result(handle)


@mutant("r12_a_journal_keeps_the_loss", "R12")
class TheJournalKnowsOnlyNone(ToyExecutor):
    def _record_end(self, journal, handle, status):
        try:
            result = self._result(handle) if status.state == "succeeded" else None
        except ResultLostError:
            result = None
        journal.record_end(handle, status, result)


# --- ends that only some can bring about, or see ---


@mutant("r5_who_fails_in_the_end_has_no_result", "R5")
class WhatAnEarlierAttemptReturnedIsKept(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for handle, entry in zip(handles, entries, strict=True):
            job = self.cloud.find(handle.metadata)
            if entry["status"] == "failed" and job is not None and job.outputs:
                entry["result"] = json.loads(job.outputs[1])
        return entries


@mutant("c3_another_process_can_cancel", "C5")
class OnlyTheLauncherCancels(Remembering):
    def _stop(self, handle):
        if handle in self.mine.values():
            super()._stop(handle)


@mutant("c7_what_never_started_ends_too", "C7")
class CancelRunEndsWhatRuns(ToyExecutor):
    def cancel_run(self, run_id):
        for handle in self.attach(run_id):
            if self.poll(handle) is ReplicaState.RUNNING:
                self.cancel(handle)


@mutant("s6_no_record_is_an_exception", "S6")
class WhoIsUnknownIsPending(ToyExecutor):
    def describe(self, handle):
        try:
            return super().describe(handle)
        except ReplicaNotFoundError:
            return ReplicaStatus(ReplicaState.PENDING)


@mutant("s6_what_the_backend_forgot_is_an_exception", "S6")
class WhoIsForgottenHasSucceeded(ToyExecutor):
    def poll(self, handle):
        return self.describe(handle).state

    def describe(self, handle):
        try:
            return super().describe(handle)
        except ReplicaNotFoundError:
            return ReplicaStatus(ReplicaState.SUCCEEDED, exit_code=0, reason=Reason.COMPLETED)
