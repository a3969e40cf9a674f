"""Wrong timeouts, and records that are kept for too short a time: S7, S13, S14."""

from dataclasses import replace

from toy_cloud import RETENTION
from toy_executor import ToyExecutor
from wrong import Telling, mutant

from diloco_protocol import ReplicaNotFoundError


@mutant("s7_a_timeout_is_a_failure", "S7", "S8", "R10")
class TimeoutOfTheFirstIsAnError(ToyExecutor):
    """In collect alone."""

    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            if entry["reason"] == "timeout":
                entry["reason"] = "error"
        return entries


class Deadline(Telling):
    """Base of those that end replicas themselves, by a clock that begins too early."""

    def _observe_run(self, handles):
        for handle in handles:
            job = self.cloud.find(handle.metadata)
            if job is not None and job.live and job.body["timeout"] is not None:
                begin = self.begin(job)
                late = begin is not None and self.cloud.clock() - begin > job.body["timeout"]
                if late:
                    self.cloud.end(handle.metadata["name"], "TIMED_OUT", 124)
        return super()._observe_run(handles)


@mutant("s13_waiting_uses_up_no_timeout", "S13", "S4", "S9", "S7")
class TimeoutCountsFromTheLaunch(Deadline):
    def tell(self, body):
        body["launched_at"] = self.cloud.clock()

    def begin(self, job):
        return job.body["launched_at"]


@mutant("s13_each_attempt_has_the_whole_timeout", "S13", "S4", "S9", "S7")
class TimeoutOverAllAttempts(Deadline):
    def tell(self, body):
        body["first"] = []

    def begin(self, job):
        if job.started_at is not None:
            job.body["first"].append(job.started_at)
        return job.body["first"][0] if job.body["first"] else None


@mutant("s13_without_a_timeout_it_runs_on", "S13", "S7", "S9")
class NoTimeoutIsAnHour(Telling):
    def tell(self, body):
        body["timeout"] = body["timeout"] or 3600


@mutant("s13_without_a_timeout_it_runs_on", "S13", "L4", "S7")
class NoTimeoutIsRefused(ToyExecutor):
    def _check_request(self, request):
        super()._check_request(request)
        if request.timeout is None:
            super()._check_request(replace(request, gpu="none"))


@mutant("s13_replicas_are_told_their_timeout", "S13")
class TimeoutIsNotTold(Telling):
    def tell(self, body):
        body["spec"]["timeout"] = None


@mutant("s13_replicas_are_told_their_timeout", "S13")
class TimeoutIsToldInWholeSeconds(Telling):
    def tell(self, body):
        body["spec"]["timeout"] = int(body["spec"]["timeout"] or 0)


# --- S14: retention ---


@mutant("s14_records_are_kept_as_long_as_declared", "S14")
class DeclaresThatItKeepsThemForEver(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, retention=None)


@mutant("s14_records_are_kept_as_long_as_declared", "S14")
class DeclaresThatItKeepsThemForTenDays(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, retention=10 * RETENTION)


@mutant("s14_records_are_kept_as_long_as_declared", "S14", "S4")
class ForgetsAfterAnHour(ToyExecutor):
    def _observe_run(self, handles):
        seen = super()._observe_run(handles)
        old = self.cloud.clock() - 3600
        kept = {one: said for one, said in seen.items() if (said.finished_at or old) >= old}
        if not kept:
            raise ReplicaNotFoundError("it is older than an hour")
        return kept
