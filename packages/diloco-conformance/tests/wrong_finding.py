"""Wrong answers to what runs there are, and where they meet: H6, H11."""

from dataclasses import replace

from toy_executor import ToyExecutor, ask
from wrong import mutant

from diloco_protocol import BackendError, ForbiddenError, ReplicaNotFoundError

MEETS = "h11_a_run_says_where_it_meets"
FORGED = "h11_no_handle_says_where_it_meets"


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class NoAnswerIsNoRun(ToyExecutor):
    def exists(self, run_id):
        try:
            return super().exists(run_id)
        except BackendError:
            return False


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class NoAnswerIsAnEmptyList(ToyExecutor):
    def _list_runs(self):
        try:
            return super()._list_runs()
        except BackendError:
            return []


@mutant("h6_a_backend_that_cannot_be_asked_is_an_exception", "H6")
class ForbiddenRunsAreUnknown(ToyExecutor):
    def _attach(self, run_id):
        try:
            return super()._attach(run_id)
        except ForbiddenError as error:
            raise ReplicaNotFoundError(f"there is no run {run_id!r}") from error


@mutant("h6_exists_is_true", "H6")
class OnlyTheLivingExist(ToyExecutor):
    def exists(self, run_id):
        jobs = ask(lambda: self.cloud.describe(run_id)).values()
        return any(job.live for job in jobs)


@mutant("h6_exists_is_true", "H6")
class ExistsByPrefix(ToyExecutor):
    def exists(self, run_id):
        return any(run.startswith(run_id) for run in self.list_runs())


@mutant(MEETS, "H11")
class MeetsByName(ToyExecutor):
    def _rendezvous(self, handle):
        jobs = ask(lambda: self.cloud.describe(handle.run_id))
        if handle.metadata["name"] not in jobs:
            return super()._rendezvous(handle)
        return jobs[handle.metadata["name"]].body["spec"]["rendezvous_uri"]


@mutant(MEETS, "H11")
class KnowsOnlyItsOwnLaunches(ToyExecutor):
    def _submit(self, request):
        self.__dict__.setdefault("meets", {})[request.run_id] = request.rendezvous_uri
        return super()._submit(request)

    def _rendezvous(self, handle):
        self._job(handle)
        return self.__dict__.get("meets", {}).get(handle.run_id)


@mutant(FORGED, "H11")
class BelievesTheHandle(ToyExecutor):
    def _handles(self, jobs):
        jobs = list(jobs)
        meets = {job.uid: job.body["spec"]["rendezvous_uri"] or "" for job in jobs}
        return [
            replace(handle, metadata={**handle.metadata, "meets": meets[handle.metadata["uid"]]})
            for handle in super()._handles(jobs)
        ]

    def _rendezvous(self, handle):
        return handle.metadata["meets"] or None
