"""Wrong removals, and launches while something is removed: C9, L11."""

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import (
    LaunchError,
    ReplicaNotFoundError,
    RunConflictError,
)

NOTHING = "c9_after_a_purge_there_is_nothing"
REMOVED = "l11_a_run_that_is_being_removed_is_not_given_out"


@mutant(NOTHING, "C9")
class PurgeIsOnlyBegun(ToyExecutor):
    def _purge(self, handle):
        super_jobs = self._jobs(handle.run_id)
        if handle in super_jobs and any(job.live for job in super_jobs.values()):
            super()._purge(handle)
        elif handle in super_jobs:
            self.cloud.remove(handle.run_id)


@mutant(NOTHING, "C9")
class PurgeOnlyHides(ToyExecutor):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.hidden = set()

    def _jobs(self, run_id):
        jobs = super()._jobs(run_id)
        return {handle: job for handle, job in jobs.items() if handle not in self.hidden}

    def _purge(self, handle):
        if any(job.live for job in self._jobs(handle.run_id).values()):
            super()._purge(handle)
        self.hidden |= self._jobs(handle.run_id).keys()


class Keeping(ToyExecutor):
    """Base of those that have something of their own that purge leaves there."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cloud.kept = getattr(self.cloud, "kept", {})

    def _purge(self, handle):
        jobs = self._jobs(handle.run_id)
        super()._purge(handle)
        self.cloud.kept.update(jobs)

    def _job(self, handle):
        return self.cloud.kept.get(handle) or super()._job(handle)


@mutant(NOTHING, "C9")
class PurgeKeepsTheLogs(Keeping):
    def _lines(self, handle, query):
        kept = self.cloud.kept.get(handle)
        if kept is None:
            return super()._lines(handle, query)
        lines = (line for chunk in kept.log for line in chunk.data.decode().splitlines())
        return ((0.0, line) for line in lines)


@mutant(NOTHING, "C9")
class PurgeKeepsTheRecords(Keeping):
    def _observe_run(self, handles):
        kept = self.cloud.kept
        known = {one: self._status(kept[one]) for one in handles if one in kept}
        return {**known, **super()._observe_run(handles)}


@mutant(NOTHING, "C9")
class PurgeKeepsTheName(Keeping):
    def _list_runs(self):
        runs = super()._list_runs()
        return list(dict.fromkeys([*(one.run_id for one in self.cloud.kept), *runs]))


@mutant("c9_purge_waits_for_a_removal_that_is_under_way", "C9")
class WhatIsBeingRemovedIsPurged(ToyExecutor):
    def _purge(self, handle):
        if not any(job.removing for job in self._jobs(handle.run_id).values()):
            super()._purge(handle)


class Relaunching(ToyExecutor):
    """Base of those that launch while the run of that name is being removed."""

    def _same(self, request):
        jobs = self.cloud.describe(request.run_id)
        return (
            self.found(jobs)
            if any(job.removing for job in jobs.values())
            else super()._same(request)
        )


@mutant(REMOVED, "L11")
class GivesOutWhatIsBeingRemoved(Relaunching):
    def found(self, jobs):
        return jobs


@mutant(REMOVED, "L11")
class TakesOverWhatIsBeingRemoved(Relaunching):
    def found(self, jobs):
        for job in self.cloud.jobs.values():
            if job.body["name"] in jobs:
                job.uid, job.status = f"{job.uid}-again", "QUEUED"
        return {job.body["name"]: job for job in self.cloud.jobs.values()}


@mutant(REMOVED, "L11")
class ARemovalIsAFailedLaunch(ToyExecutor):
    def _submit(self, request):
        try:
            return super()._submit(request)
        except RunConflictError as error:
            if "being removed" in str(error):
                raise LaunchError(str(error)) from error
            raise


@mutant(REMOVED, "L11")
class ARemovalIsNoRecord(Relaunching):
    def found(self, jobs):
        raise ReplicaNotFoundError("the run is going")
