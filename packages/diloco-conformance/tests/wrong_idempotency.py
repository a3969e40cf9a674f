"""Wrong comparisons with a launch of the same name: L7."""

from dataclasses import replace

from toy_executor import ToyExecutor, ask
from wrong import mutant

from diloco_protocol import (
    InvalidRequestError,
    RunConflictError,
)

COUNTS = "l7_every_argument_counts"


class Forgetting(ToyExecutor):
    """Base of those for whom some argument does not count."""

    forgets = {}

    def blurred(self, request):
        return replace(request, **self.forgets)

    def _bodies(self, request):
        agreed = self.blurred(request).fingerprint()
        return [{**body, "fingerprint": agreed} for body in super()._bodies(request)]

    def _same(self, request):
        return super()._same(self.blurred(request))


@mutant(COUNTS, "L7")
class VariablesDoNotCount(Forgetting):
    forgets = {"env": {}}


@mutant(COUNTS, "L7")
class TimeoutDoesNotCount(Forgetting):
    forgets = {"timeout": None}


@mutant(COUNTS, "L7")
class EntrypointDoesNotCount(Forgetting):
    forgets = {"entrypoint": "any:thing"}


@mutant(COUNTS, "L7")
class LabelsDoNotCount(Forgetting):
    forgets = {"labels": {}}


@mutant(COUNTS, "L7")
class SecretsDoNotCount(Forgetting):
    forgets = {"secrets": {}}


@mutant(COUNTS, "L7")
class RestartsDoNotCount(Forgetting):
    forgets = {"max_restarts": 0}


@mutant(COUNTS, "L7")
class WorldSizeDoesNotCount(Forgetting):
    forgets = {"world_size": 100}


@mutant(COUNTS, "L7")
class CohortDoesNotCount(Forgetting):
    forgets = {"cohort": "any"}


@mutant(COUNTS, "L7")
class NameOfTheRankDoesNotCount(Forgetting):
    forgets = {"rank_env": "REPLICA_RANK"}


@mutant(COUNTS, "L7")
class NameOfTheSizeDoesNotCount(Forgetting):
    forgets = {"world_size_env": "ANY"}


@mutant(COUNTS, "L7")
class GpusDoNotCount(Forgetting):
    forgets = {"gpu": None}


@mutant(COUNTS, "L7")
class CpusDoNotCount(Forgetting):
    forgets = {"cpu": None}


@mutant(COUNTS, "L7")
class MemoryDoesNotCount(Forgetting):
    forgets = {"memory": None}


@mutant(COUNTS, "L7")
class SpotDoesNotCount(Forgetting):
    forgets = {"spot": None}


@mutant(COUNTS, "L7")
class SpotUnsaidIsSpotRefused(Forgetting):
    def blurred(self, request):
        return replace(request, spot=request.spot or None)


@mutant(COUNTS, "L7")
class OffsetDoesNotCount(Forgetting):
    def blurred(self, request):
        return replace(request, ranks=tuple(range(len(request.ranks))))


@mutant(COUNTS, "L7")
class NumberDoesNotCount(Forgetting):
    def blurred(self, request):
        return replace(request, ranks=request.ranks[:1])


@mutant(COUNTS, "L7")
class TrueIsOne(Forgetting):
    def blurred(self, request):
        kwargs = {key: int(x) if isinstance(x, bool) else x for key, x in request.kwargs.items()}
        return replace(request, kwargs=kwargs)


@mutant(COUNTS, "L7")
class OneIsOnePointZero(Forgetting):
    def blurred(self, request):
        kwargs = {key: float(x) if type(x) is int else x for key, x in request.kwargs.items()}
        return replace(request, kwargs=kwargs)


@mutant(COUNTS, "L7")
class NestedArgumentsDoNotCount(Forgetting):
    def blurred(self, request):
        kwargs = {key: x for key, x in request.kwargs.items() if not isinstance(x, (dict, list))}
        return replace(request, kwargs=kwargs)


@mutant(COUNTS, "L7")
class AConflictIsWrongInput(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError as error:
            raise InvalidRequestError(str(error)) from error


@mutant(COUNTS, "L7")
class AConflictChangesTheRun(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError:
            for job in self.cloud.jobs.values():
                if job.body["run_id"] == request.run_id:
                    job.body["env"].update(request.env)
            raise


@mutant(COUNTS, "L7")
class AConflictStartsWhatIsMissing(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError:
            body = self._bodies(request)[-1]
            if body["name"] not in self.cloud.jobs:
                self.cloud.create(body["name"], body, "by-mistake")
            raise


@mutant(COUNTS, "L7")
class OnlyTheLivingConflict(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError:
            jobs = ask(lambda: self.cloud.describe(request.run_id))
            if any(job.live for job in jobs.values()):
                raise
            return jobs
