"""Wrong launches: L2 to L4, and L8."""

from dataclasses import replace

from toy_cloud import CloudError
from toy_executor import ToyExecutor, ask
from wrong import Telling, mutant

from diloco_protocol import (
    BackendError,
    RunConflictError,
)

PART = "l8_a_part_of_a_run"


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


@mutant("l4_wrong_arguments_are_refused_before_anything_is_called", "L4")
class LooksBeforeItChecks(ToyExecutor):
    def launch_replicas(self, *args, **options):
        self.cloud.runs()
        return super().launch_replicas(*args, **options)


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


@mutant("l3_a_launch_whose_answer_is_lost_is_found_again", "L3")
class TwiceOnAmbiguity(ToyExecutor):
    def _create(self, request, body, uid):
        try:
            self.cloud.create(body["name"], body, uid)
        except CloudError:
            run_id = body["run_id"] + "-again"
            self.cloud.create(f"{run_id}-0", {**body, "run_id": run_id}, uid)
