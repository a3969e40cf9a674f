"""Wrong purges: C9."""

import contextlib

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import BackendError, InvalidRequestError


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


@mutant("c9_a_purge_that_fails_raises", "C9")
class TriesToPurgeForEver(ToyExecutor):
    def _delete(self, handle):
        while True:
            try:
                return super()._delete(handle)
            except BackendError:
                self._backoff.sleep(1.0)


@mutant("c9_purge_waits_for_a_removal_that_is_under_way", "C9")
class WaitsForARemovalForEver(ToyExecutor):
    """It looks again and again at the answer of its first look."""

    def _purge(self, handle):
        jobs = self._jobs(handle.run_id)
        while any(job.removing for job in jobs.values()):
            self._backoff.sleep(1.0)
        super()._purge(handle)


@mutant("c6_purge_is_refused_while_something_lives", "C6", "C9", "H4")
class WaitsForTheRunToBeThere(ToyExecutor):
    def _purge(self, handle):
        while handle not in self._jobs(handle.run_id):
            self._backoff.sleep(1.0)
        super()._purge(handle)
