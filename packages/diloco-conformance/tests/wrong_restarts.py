"""Wrong restarts that a platform does as it was told, and cancels that it forgets: L9, C5."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Restating, Telling, mutant

from diloco_protocol import (
    InvalidRequestError,
    Reason,
    ReplicaState,
)

EVERY = "l9_every_failure_is_followed_by_the_next_attempt"
RESTARTS = "l9_a_failed_attempt_is_started_again"


TIMEOUT = "l9_a_timeout_is_followed_by_the_next_attempt"
PREEMPTION = "l9_a_preemption_uses_up_no_restart"
FORGOTTEN = "c5_a_preemption_does_not_undo_a_cancel"


class Instructing(ToyExecutor):
    """Base of those that tell the cloud what to do when something happens to a job."""

    def __init__(self, cloud, **options):
        super().__init__(cloud, **options)
        if not hasattr(cloud, "instructed"):
            cloud.instructed = True
            self.instruct(cloud)


@mutant(TIMEOUT, "L9")
class NoRestartAfterATimeout(Instructing):
    def instruct(self, cloud):
        end = cloud.end

        def last(name, status, *how, **why):
            if status == "TIMED_OUT":
                cloud.jobs[name].body["restarts"] = 0
            end(name, status, *how, **why)

        cloud.end = last


@mutant(TIMEOUT, "L9")
class ATimeoutUsesUpAllRestarts(Instructing):
    def instruct(self, cloud):
        end = cloud.end

        def last(name, status, *how, **why):
            if status == "TIMED_OUT":
                cloud.jobs[name].failures = cloud.jobs[name].body["restarts"]
            end(name, status, *how, **why)

        cloud.end = last


@mutant(PREEMPTION, "L9")
class APreemptionIsAFailure(Instructing):
    def instruct(self, cloud):
        preempt = cloud.preempt

        def counted(name, output=None):
            preempt(name, output)
            cloud.jobs[name].failures += 1

        cloud.preempt = counted


@mutant(PREEMPTION, "L9")
class APreemptionGivesARestartBack(Instructing):
    """So that a replica which is preempted may fail more often than it was allowed to."""

    def instruct(self, cloud):
        preempt = cloud.preempt

        def forgiven(name, output=None):
            preempt(name, output)
            cloud.jobs[name].failures = 0

        cloud.preempt = forgiven


@mutant(FORGOTTEN, "C5")
class APreemptionUndoesACancel(Instructing):
    def instruct(self, cloud):
        preempt = cloud.preempt

        def afresh(name, output=None):
            preempt(name, output)
            cloud.jobs[name].stopping = False

        cloud.preempt = afresh


@mutant(FORGOTTEN, "C5", "S4", "S8", "S3")
class CancelsAnAttempt(ToyExecutor):
    """The next attempt knows nothing of the cancel."""

    def _stop(self, handle):
        super()._stop(handle)
        job = self.cloud.find(handle.metadata)
        if job is not None and job.stopping:
            job.stopped = job.attempt

    def _jobs(self, run_id):
        jobs = super()._jobs(run_id)
        for handle, job in jobs.items():
            if getattr(job, "stopped", job.attempt) != job.attempt:
                self.cloud.find(handle.metadata).stopping = False
                jobs[handle] = replace(job, stopping=False)
        return jobs


@mutant(RESTARTS, "L9")
class RestartsAreIgnored(Telling):
    def tell(self, body):
        body["restarts"] = 0


@mutant(RESTARTS, "L9")
class OneRestartAtMost(Telling):
    def tell(self, body):
        body["restarts"] = min(body["restarts"], 1)


@mutant(RESTARTS, "L9")
class OneRestartTooMany(Telling):
    def tell(self, body):
        body["restarts"] += body["restarts"] > 0


@mutant(RESTARTS, "L9")
class RefusesRestartsInPlansAlone(ToyExecutor):
    def plan(self, *args, **options):
        if options.get("max_restarts"):
            raise InvalidRequestError("max_restarts: there are none")
        return super().plan(*args, **options)


class OnlySomeAreRestarted(ToyExecutor):
    """Base of those whose jobs are not started again after some failures."""

    def __init__(self, cloud, **options):
        super().__init__(cloud, **options)
        end = cloud.end

        def end_for_good(name, status, exit_code, **why):
            if self.for_good(why):
                cloud.jobs[name].body["restarts"] = 0
            end(name, status, exit_code, **why)

        cloud.end = end_for_good


@mutant(EVERY, "L9")
class NoRestartAfterASignal(OnlySomeAreRestarted):
    def for_good(self, why):
        return "signal" in why and "reason" not in why


@mutant(EVERY, "L9")
class NoRestartWithoutMemory(OnlySomeAreRestarted):
    def for_good(self, why):
        return why.get("reason") == "OutOfMemory"


@mutant(EVERY, "L9")
class ACrashIsAPreemption(Restating):
    def restate(self, handle, status, seen):
        again = status.attempt > 1 and status.state is ReplicaState.PENDING
        return replace(status, reason=Reason.PREEMPTED) if again else status


@mutant("s8_exit_codes_and_reasons_are_the_true_ones", "L9")
class AlwaysRestarts(Telling):
    def tell(self, body):
        body["restarts"] = max(1, body["restarts"])
