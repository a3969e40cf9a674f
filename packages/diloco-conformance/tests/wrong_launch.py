"""Wrong launches: L2 to L9."""

from dataclasses import replace

from toy_cloud import CloudError
from toy_executor import ToyExecutor, ask
from wrong import Restating, Telling, mutant

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    Reason,
    ReplicaState,
    RunConflictError,
)

COUNTS = "l7_every_argument_counts"
PART = "l8_a_part_of_a_run"
EVERY = "l9_every_failure_is_followed_by_the_next_attempt"
RESTARTS = "l9_a_failed_attempt_is_started_again"


@mutant("l2_a_refused_launch_leaves_nothing", "L2")
class ARefusalStandsInTheWay(ToyExecutor):
    def _withdraw(self, request, uid):
        for job in self.cloud.jobs.values():
            if job.uid == uid:
                self.cloud._end(job, "STOPPED", 143)
        return []


@mutant("l2_a_refused_launch_leaves_nothing", "L2")
class WithdrawsAllButTheFirst(ToyExecutor):
    def _delete(self, handle):
        if handle.rank:
            super()._delete(handle)


@mutant("l3_the_same_in_other_words_is_the_same_run", "L3")
class OrderOfKeysCounts(ToyExecutor):
    def _bodies(self, request):
        bodies = super()._bodies(request)
        return [{**body, "fingerprint": str(request.kwargs)} for body in bodies]

    def _same(self, request):
        jobs = ask(lambda: self.cloud.describe(request.run_id))
        if any(job.body["fingerprint"] != str(request.kwargs) for job in jobs.values()):
            raise RunConflictError("other arguments")
        return jobs


@mutant("l3_the_same_run_id_is_the_same_run", "L3")
class EveryLaunchIsNew(ToyExecutor):
    def _same(self, request):
        if any(not job.live for job in self.cloud.describe(request.run_id).values()):
            return {}
        return super()._same(request)

    def _create(self, request, body, uid):
        self.cloud.jobs.pop(body["name"], None)
        super()._create(request, body, uid)


@mutant("l3_a_launch_that_cannot_look_changes_nothing", "L3")
class OverwritesWhatItCannotSee(ToyExecutor):
    def _same(self, request):
        try:
            return super()._same(request)
        except RunConflictError:
            raise
        except BackendError:
            for rank in request.ranks:
                self.cloud.jobs.pop(f"{request.run_id}-{rank}", None)
            return {}


class Forgetting(Telling):
    """Base of those that compare less than all arguments."""

    def _same(self, request):
        return super()._same(self.forget(request))

    def tell(self, body):
        body["fingerprint"] = self.mark

    def _bodies(self, request):
        self.mark = self.forget(request).fingerprint()
        return super()._bodies(request)


@mutant(COUNTS, "L7")
class NameOfTheSizeIsNotCompared(Forgetting):
    def forget(self, request):
        return replace(request, world_size_env="ANY")


@mutant(COUNTS, "L7")
class SpotUnsaidIsSpotRefused(Forgetting):
    def forget(self, request):
        return replace(request, spot=request.spot or None)


@mutant("l4_wrong_arguments_are_refused_before_anything_is_called", "L4")
class LooksBeforeItChecks(ToyExecutor):
    def launch_replicas(self, *args, **options):
        self.cloud.runs()
        return super().launch_replicas(*args, **options)


# --- idempotency ---


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


# --- parts ---


@mutant(PART, "L8")
class OffsetIsIgnored(ToyExecutor):
    def _request(self, *arguments, **options):
        request = super()._request(*arguments, **options)
        return replace(request, ranks=tuple(range(len(request.ranks))))


@mutant(PART, "L8")
class WorldSizeIsTheNumberHere(ToyExecutor):
    def _handle(self, run_id, rank, world_size, uid):
        here = sum(job.body["run_id"] == run_id for job in self.cloud.jobs.values())
        return super()._handle(run_id, rank, here, uid)


@mutant(PART, "L8")
class IsToldTheNumberHere(Telling):
    def _bodies(self, request):
        return super()._bodies(replace(request, world_size=request.ranks[-1] + 1))

    def _same(self, request):
        return super()._same(replace(request, world_size=request.ranks[-1] + 1))

    def tell(self, body):
        pass


@mutant(PART, "L8")
class AttachCountsFromZero(ToyExecutor):
    def _attach(self, run_id):
        handles = super()._attach(run_id)
        first = handles[0].rank
        return [replace(handle, rank=handle.rank - first) for handle in handles]


@mutant(PART, "L8")
class RanksArePlaces(ToyExecutor):
    def _observe_run(self, handles):
        run = self._attach(handles[0].run_id)
        seen = super()._observe_run(run)
        places = {handle: run[handle.rank] for handle in handles if handle.rank < len(run)}
        return {handle: seen[place] for handle, place in places.items()}


# --- restarts ---


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


@mutant("l3_a_launch_whose_answer_is_lost_is_found_again", "L3")
class TwiceOnAmbiguity(ToyExecutor):
    def _create(self, request, body, uid):
        try:
            self.cloud.create(body["name"], body, uid)
        except CloudError:
            run_id = body["run_id"] + "-again"
            self.cloud.create(f"{run_id}-0", {**body, "run_id": run_id}, uid)


# --- what replicas are to have ---


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
