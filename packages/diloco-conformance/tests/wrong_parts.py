"""Wrong parts of a cohort, second launches, followers that stay, wrong times: L8, L3, G3, R2."""

import math
import threading
import time
from contextlib import suppress
from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import BackendError, ReplicaNotFoundError, ReplicaState, RunConflictError

COHORT = "l8_parts_of_one_cohort_are_runs_of_their_own"
AGAIN = "l3_what_was_cancelled_is_not_started_again"
NEVER = "g3_it_ends_where_the_replica_never_started"
BEHIND = "g3_who_stops_reading_leaves_nothing_behind"
LONG = 4.0
"""Seconds that are more than the patience of the tests, so that no thread is left for long."""
NO_TIME = "r2_a_time_that_is_none_is_refused"


class OfTheCohort(ToyExecutor):
    """Base of those that mix up a run and its cohort."""

    def cohort(self, run_id):
        """The runs of its cohort."""
        jobs = [job.body for job in self.cloud.jobs.values() if "env" in job.body]
        named = {body["run_id"]: body["env"]["DILOCO_COHORT"] for body in jobs}
        return [one for one in named if named[one] == named.get(run_id)]


@mutant(COHORT, "L8")
class OnePartPerExecutor(ToyExecutor):
    def _submit(self, request):
        for job in self.cloud.jobs.values():
            same = job.body.get("env", {}).get("DILOCO_COHORT") == request.cohort
            if same and job.body["run_id"] != request.run_id:
                raise RunConflictError("this cohort has a part here already")
        return super()._submit(request)


@mutant(COHORT, "L8")
class AttachGivesTheCohort(OfTheCohort):
    def _attach(self, run_id):
        handles = super()._attach(run_id)
        for other in self.cohort(run_id):
            handles += super()._attach(other) if other != run_id else []
        return sorted(handles, key=lambda handle: handle.rank)


@mutant(COHORT, "L8")
class ListsCohorts(OfTheCohort):
    def _list_runs(self):
        runs = super()._list_runs()
        return [run_id for run_id in runs if self.cohort(run_id)[:1] in ([], [run_id])]


@mutant(COHORT, "L8")
class EndsTheCohort(OfTheCohort):
    def cancel_run(self, run_id):
        for one in self.cohort(run_id) or [run_id]:
            super().cancel_run(one)


@mutant(COHORT, "L8")
class PurgesTheCohort(OfTheCohort):
    def _purge(self, handle):
        cohort = self.cohort(handle.run_id)
        super()._purge(handle)
        for run_id in cohort:
            for one, job in self._jobs(run_id).items():
                if not job.live:
                    self._delete(one)


@mutant(AGAIN, "L3")
class ASecondLaunchTakesTheCancelBack(ToyExecutor):
    def _same(self, request):
        jobs = super()._same(request)
        for name in jobs:
            self.cloud.jobs[name].stopping = False
        return jobs


@mutant(AGAIN, "L3")
class WhatWasCancelledIsFree(ToyExecutor):
    def _same(self, request):
        jobs = super()._same(request)
        for name in [name for name, job in jobs.items() if job.status == "STOPPED"]:
            del self.cloud.jobs[name], jobs[name]
        return jobs


@mutant(NEVER, "G3")
class WaitsForTheStart(ToyExecutor):
    def _lines(self, handle, query):
        end = time.monotonic() + LONG
        while query.follow and not self._job(handle).started_at and time.monotonic() < end:
            time.sleep(0.01)
        yield from super()._lines(handle, query)


@mutant(NEVER, "G3")
class WhoNeverStartedIsFollowedOn(ToyExecutor):
    def _logs(self, handle, query):
        end = time.monotonic() + LONG
        while query.follow and self._never_ran(handle) and time.monotonic() < end:
            time.sleep(0.01)
        return super()._logs(handle, query)

    def _never_ran(self, handle):
        return self._job(handle).started_at is None


class Watching(ToyExecutor):
    """Base of those that read in a thread."""

    def _logs(self, handle, query):
        if query.follow:
            threading.Thread(target=self.watch, args=(handle,), daemon=True).start()
        return super()._logs(handle, query)


@mutant(BEHIND, "G3")
class WatchesUntilTheEnd(Watching):
    def watch(self, handle):
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            with suppress(BackendError):  # asked while the backend is disturbed
                if not self.exists(handle.run_id):
                    return
            time.sleep(0.02)


@mutant(BEHIND, "G3")
class WatchesForAWhile(Watching):
    def watch(self, handle):
        time.sleep(LONG)


@mutant(NO_TIME, "R2")
class LessThanNothingIsNothing(ToyExecutor):
    def collect(self, handles, *, timeout=None, **options):
        if isinstance(timeout, float | int) and timeout < 0:
            timeout = 0.0
        return super().collect(handles, timeout=timeout, **options)


@mutant(NO_TIME, "R2")
class NotANumberIsForever(ToyExecutor):
    def collect(self, handles, *, timeout=None, **options):
        if isinstance(timeout, float) and math.isnan(timeout):
            timeout = 0.5
        return super().collect(handles, timeout=timeout, **options)


@mutant("r2_it_waits_for_what_ends_meanwhile", "R2")
class ProgressIsOfTheFirstLook(ToyExecutor):
    def collect(self, handles, *, progress=None, **options):
        first = []

        def tell(statuses):
            first.append(statuses)
            progress(first[0])

        return super().collect(handles, progress=tell if progress else None, **options)


@mutant("r2_it_waits_for_what_ends_meanwhile", "R2")
class ProgressKnowsNothing(ToyExecutor):
    def collect(self, handles, *, progress=None, **options):
        def tell(statuses):
            progress(
                {one: replace(said, state=ReplicaState.PENDING) for one, said in statuses.items()}
            )

        return super().collect(handles, progress=tell if progress else None, **options)


@mutant("l12_the_journal_of_the_constructor_is_written_and_read", "H6")
class WhatTheJournalKnowsExists(ToyExecutor):
    def exists(self, run_id):
        try:
            return bool(self.attach(run_id))
        except ReplicaNotFoundError:
            return False


@mutant("d3_check_starts_nothing", "D3")
class CheckSaysNothing(ToyExecutor):
    def check(self, *arguments, **options):
        super().check(*arguments, **options)


@mutant("e4_no_secret_in_the_arguments_of_a_plan", "E4")
class PlansShowAddressesAsTheyAre(ToyExecutor):
    def plan(self, *arguments, env=None, **options):
        plan = super().plan(*arguments, env=env, **options)
        for request in plan.requests:
            request["env"].update({name: x for name, x in (env or {}).items() if "://" in x})
        return plan
