"""Wrong answers to what runs there are: H6."""

from toy_executor import ToyExecutor, ask
from wrong import mutant

from diloco_protocol import BackendError, ForbiddenError, ReplicaNotFoundError


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
